"""The Python that has OpenHands, which verifiers' has not, and the release of verifiers that fits."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata

import openhands_rl_plugin
from openhands_rl_plugin.apps.rollout.program import VARIABLE, last_line
from openhands_rl_plugin.core.errors import ConfigError

FITS = "0.4"
"""The release of verifiers that the classes are written for."""

_HOW = (
    "make one with `uv venv OPENHANDS && uv pip install --python OPENHANDS 'openhands_rl_plugin[sdk]'`, then give "
    f"--env.agent.harness.python OPENHANDS/bin/python, or export {VARIABLE}=OPENHANDS/bin/python"
)
_DISTRIBUTIONS = ("openhands_rl_plugin", "openhands-sdk", "openhands-ai")
_PROBE = (
    "import importlib.metadata as m, json\n"
    "def at(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    f"print(json.dumps([at(name) for name in {_DISTRIBUTIONS!r}]))"
)


class UnfitVerifiersError(ConfigError, ValueError):
    """Another release of verifiers, or none. A ``ValueError`` too: verifiers' commands show those in one line."""


def check_verifiers() -> None:
    """Raise ``UnfitVerifiersError`` for what the classes were not written for."""
    how = f"pip install 'verifiers=={FITS}.*' openhands_rl_plugin, in a Python without OpenHands"
    try:
        found = metadata.version("verifiers")
    except metadata.PackageNotFoundError as error:
        raise UnfitVerifiersError(f"verifiers is not installed in this Python: {how}") from error
    if not f"{found}.".startswith(f"{FITS}."):
        raise UnfitVerifiersError(f"openhands_rl_verifiers needs verifiers {FITS}, and this Python has {found}: {how}")


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
        raise ConfigError(
            f"{python} has openhands_rl_plugin {ours}, and the Python of verifiers {here}: install the same in both"
        )
