"""What the harness starts: ``openhands-rl rollout`` in a Python that has OpenHands, which verifiers' has not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

import openhands_rl_plugin
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

FITS = "0.4"
"""The release of verifiers that the classes are written for."""
VARIABLE = "OPENHANDS_RL_PYTHON"
SECRET = "OPENHANDS_RL_ROLLOUT_SECRET"
"""The environment variable with the key of the one rollout's endpoint."""
STORE = "episodes"
"""The store of an episode that verifiers records, in the folder of its runtime, which goes with it."""

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
        raise ConfigError(f"{python} does not run ({_last_line(stderr) or f'exit code {exit_code}'}): {_HOW}")
    here = openhands_rl_plugin.__version__
    if ours is None or not any(hosts):
        raise ConfigError(f"{python} has no {'openhands_rl_plugin' if ours is None else 'OpenHands'}: {_HOW}")
    if ours != here:
        raise ConfigError(
            f"{python} has openhands_rl_plugin {ours}, and the Python of verifiers {here}: install the same in both"
        )


def rollout_command(
    python: str,
    task: Sequence[str],
    base_url: str,
    model: str,
    options: Mapping[str, object],
    store: Path | None = None,
) -> list[str]:
    """``openhands-rl rollout`` of the task that the options ``task`` choose, against an endpoint that records it.

    ``options``: fields of ``PlaySettings``. Paths are those of this process; the program has another working folder.
    The endpoint's key is in the variable ``SECRET``.
    """
    words = [python, "-P", "-m", "openhands_rl_plugin", "rollout", *task, "--json", "--token-ids", "false"]
    words += ["--base-url", base_url, "--model", model, "--base-model", model, "--api-key-env", SECRET]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", _word(value)]
    return [*words, "--store", STORE if store is None else _word(store)]


def _word(value: object) -> str:
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_episode(exit_code: int, stdout: str, stderr: str) -> PlayedRollout | str:
    """The episode that the command printed, or in one line why there is none that may be trained on."""
    try:
        printed = json.loads(stdout)
        if isinstance(printed, dict) and "trajectory_id" not in printed:
            failure = printed["failure"]
            return f"{failure['kind']}: {failure['message']}"
        played = PlayedRollout.model_validate(printed, strict=False)
    except (ValueError, ValidationError, LookupError, TypeError):
        said = _last_line(stderr) or _last_line(stdout) or "it said nothing"
        return f"infrastructure: openhands-rl rollout ended with exit code {exit_code}: {said}"
    return played if played.failure is None else f"{played.failure.kind.value}: {played.failure.message}"


def facts_of(played: PlayedRollout) -> JsonObject:
    """What a trace keeps of an episode beside its messages and tokens."""
    kept = {"trajectory_id", "task_id", "environment", "reward", "reward_version", "resolved", "stop", "cut_short"}
    return played.model_dump(mode="json", include={*kept, "off_policy", "turns", "seconds"})


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[-500:] if lines else ""
