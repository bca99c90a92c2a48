"""The Python that has OpenHands, which a trainer's has not, and the release of the trainer that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata

import openhands_rl_plugin
from openhands_rl_plugin.apps.rollout.program import VARIABLE, last_line
from openhands_rl_plugin.core.errors import ConfigError

_HOW = (
    "make one with `uv venv OPENHANDS && uv pip install --python OPENHANDS 'openhands_rl_plugin[sdk]'`, then export "
    f"{VARIABLE}=OPENHANDS/bin/python"
)
_SECONDS = 60.0
_DISTRIBUTIONS = ("openhands_rl_plugin", "openhands-sdk", "openhands-ai")
_PROBE = (
    "import importlib.metadata as m, json\n"
    "def at(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    f"print(json.dumps([at(name) for name in {_DISTRIBUTIONS!r}]))"
)


class UnfitReleaseError(ConfigError, ValueError):
    """Another release of a trainer, or none. A ``ValueError`` too: verifiers' commands show those in one line."""


def check_release(package: str, fits: str) -> None:
    """Raise ``UnfitReleaseError`` unless this Python has a release ``fits`` of ``package``."""
    how = f"pip install '{package}=={fits}.*' openhands_rl_plugin, in a Python without OpenHands"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise UnfitReleaseError(f"{package} is not installed in this Python: {how}") from error
    if not f"{found}.".startswith(f"{fits}."):
        raise UnfitReleaseError(
            f"openhands_rl_plugin needs {package} {fits} for this, and this Python has {found}: {how}"
        )


def interpreter(named: str = "") -> str:
    """The Python that has OpenHands: the one named, the variable's, or this one. Raises ``ConfigError`` for none."""
    found = os.path.expanduser(named or os.environ.get(VARIABLE, "") or sys.executable)
    if not os.access(found, os.X_OK) or os.path.isdir(found):
        raise ConfigError(f"{found} is no Python: {_HOW}")
    return os.path.abspath(found)


def probe(python: str) -> list[str]:
    """The command whose output ``check_probe`` reads."""
    return [python, "-P", "-c", _PROBE]


def check_probe(python: str, exit_code: int, stdout: str, stderr: str) -> None:
    """Raise ``ConfigError`` for a Python without OpenHands, or with another version of this package than this one."""
    try:
        ours, *hosts = json.loads(stdout) if exit_code == 0 else ["?"]
    except (ValueError, TypeError):
        exit_code, ours, hosts = 1, None, []
    if exit_code:
        raise ConfigError(f"{python} does not run ({last_line(stderr) or f'exit code {exit_code}'}): {_HOW}")
    here = openhands_rl_plugin.__version__
    if ours is None or not any(hosts):
        raise ConfigError(f"{python} has no {'openhands_rl_plugin' if ours is None else 'OpenHands'}: {_HOW}")
    if ours != here:
        raise ConfigError(f"{python} has openhands_rl_plugin {ours}, and this Python {here}: install the same in both")


@cache
def checked_interpreter() -> str:
    """``interpreter()``, asked once for what it has. Raises ``ConfigError``. Blocks."""
    python = interpreter()
    ran = subprocess.run(probe(python), capture_output=True, text=True, check=False, timeout=_SECONDS)
    check_probe(python, ran.returncode, ran.stdout, ran.stderr)
    return python
