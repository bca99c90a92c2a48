"""A rollout as a program of the Python that has OpenHands, for trainers whose own Python has not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import ValidationError

import openhands_rl_plugin
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.config.host import version_of
from openhands_rl_plugin.config.rollout import options_from_trainer
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject

PROGRAM = "openhands_rl_plugin.cli.rollout"
VARIABLE = "OPENHANDS_RL_PYTHON"
"""The environment variable that names the Python with OpenHands."""
SECRET = "OPENHANDS_RL_ROLLOUT_SECRET"
"""The environment variable with the key of the one rollout's endpoint."""
STORE = "episodes"
"""The store of an episode that the trainer records, in the working folder, which goes with it."""
GRACE = 60.0
"""Seconds that the program has beyond the episode's own limit, to say why it ended."""
_AWAY = 5.0
"""Seconds before an episode is rolled out again."""
_HOW = (
    "make one with `uv venv OPENHANDS && uv pip install --python OPENHANDS '.[sdk]'` in a clone, then export "
    f"{VARIABLE}=OPENHANDS/bin/python"
)
_PROBE = (
    "import importlib.metadata as m, json\n"
    "def at(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps([at(name) for name in ('openhands_rl_plugin', 'openhands-sdk', 'openhands-ai')]))"
)


class EpisodeProgram:
    """Rolls out episodes by the options that a trainer's configuration has below ``where``.

    ``fixed``: the options that the ``trainer`` sets itself. ``tries``: rollouts of one that failed by
    the infrastructure. ``store``: keeps the episodes; without it they go with their process. Raises ``ConfigError`` for
    options that are not there, and for a Python without OpenHands.
    """

    def __init__(
        self,
        given: Mapping[str, object],
        *,
        where: str,
        trainer: str,
        fixed: frozenset[str],
        tries: int = 2,
        store: str = "",
    ) -> None:
        if tries < 1:
            raise ConfigError(f"{where.removesuffix('options')}tries has to be 1 or more")
        checked = options_from_trainer(given, where, trainer, fixed)
        self._options = {name: getattr(checked, name) for name in given}
        self._seconds = checked.timeout + GRACE
        self._tries = tries
        self._store = Path(store) if store else None
        self._python = checked_interpreter()

    async def play(
        self, task: str, base_url: str, model: str, *, base_model: str = "", key: str = "none", **changes: object
    ) -> PlayedRollout | str:
        """The episode of ``task``, an id or a row as JSON; or in one line why there is none that may be trained on.

        ``changes``: further options. An episode without reward or token ids is none.
        """
        row, why = task.lstrip().startswith("{"), ""
        for number in range(self._tries):
            options = {**self._options, **changes}
            if number:
                await asyncio.sleep(_AWAY)
                if name := options.get("group_id"):
                    # One that failed is stored under its own names, and would be returned.
                    options["group_id"] = f"{name}/again-{number}"
            words = rollout_command(
                self._python,
                ("--task", "-" if row else task),
                base_url,
                model,
                options,
                self._store,
                base_model=base_model,
                token_ids=True,
            )
            ran = await run_program(words, task if row else "", key=key, seconds=self._seconds)
            if not isinstance(ran, str):
                valid = ran.reward is not None and ran.segments
                return ran if valid else "model: the episode has no reward or no token ids"
            why = ran
            if not why.startswith("infrastructure: "):
                break
        return why


async def run_program(words: Sequence[str], given: str, *, key: str, seconds: float) -> PlayedRollout | str:
    """The episode that a program prints which is ``given`` its standard input, or in one line why there is none.

    It and all that it started are killed after ``seconds``, and with the task that waits for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**os.environ, SECRET: key},
            cwd=folder,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        try:
            printed = await asyncio.wait_for(process.communicate(given.encode()), seconds)
        except TimeoutError:
            return f"infrastructure: the episode's program did not end within {seconds:g} s"
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return read_episode(process.returncode or 0, *(each.decode(errors="replace") for each in printed))


def rollout_command(
    python: str,
    task: Sequence[str],
    base_url: str,
    model: str,
    options: Mapping[str, object],
    store: Path | None = None,
    *,
    base_model: str = "",
    token_ids: bool = False,
) -> list[str]:
    """The rollout of the task that the options ``task`` choose, against an endpoint that records it.

    ``options``: fields of ``PlayOptions``. Paths are those of this process; the program has another working folder.
    The endpoint's key is in the variable ``SECRET``. ``base_model``: where it is not ``model`` itself. ``token_ids``:
    ask for them, where the endpoint keeps none itself.
    """
    words = [python, "-P", "-m", PROGRAM, *task, "--token-ids", _word(token_ids)]
    words += ["--base-url", base_url, "--model", model, "--base-model", base_model or model, "--api-key-env", SECRET]
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
        found = PlayedRollout.model_validate(printed, strict=False)
    except (ValueError, ValidationError, LookupError, TypeError):
        last = _last_line(stderr) or _last_line(stdout) or "it printed nothing"
        return f"infrastructure: the rollout ended with exit code {exit_code}: {last}"
    return found if found.failure is None else f"{found.failure.kind.value}: {found.failure.message}"


def facts_of(rollout: PlayedRollout) -> JsonObject:
    """What a trace keeps of an episode beside its messages and tokens."""
    kept = {"trajectory_id", "task_id", "environment", "reward", "reward_version", "resolved", "stop", "cut_short"}
    return rollout.model_dump(mode="json", include={*kept, "off_policy", "turns", "seconds"})


@cache
def checked_interpreter(named: str = "") -> str:
    """The Python that has OpenHands: the one named, the variable's, or this one. Blocks.

    Raises ``ConfigError`` for a Python without OpenHands, or with another version of this package than this one.
    """
    python = os.path.abspath(os.path.expanduser(named or os.environ.get(VARIABLE, "") or sys.executable))
    try:
        ran = subprocess.run([python, "-P", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=60.0)
        ours, *hosts = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{python} is no Python that runs ({error}): {_HOW}") from error
    if ours is None or not any(hosts):
        raise ConfigError(f"{python} has no {'openhands_rl_plugin' if ours is None else 'OpenHands'}: {_HOW}")
    if ours != (here := openhands_rl_plugin.__version__):
        raise ConfigError(f"{python} has openhands_rl_plugin {ours}, and this Python {here}: install the same in both")
    return python


class UnfitReleaseError(ConfigError, ValueError):
    """Another release of a trainer, or none. A ``ValueError`` too: verifiers' commands show those in one line."""


def check_release(package: str, fits: str) -> None:
    """Raise ``UnfitReleaseError`` unless this Python has a release ``fits`` of ``package``."""
    found = version_of(package) or "none"
    if not f"{found}.".startswith(f"{fits}."):
        raise UnfitReleaseError(
            f"openhands_rl_plugin needs {package} {fits} for this, and this Python has {found}: "
            f"pip install '{package}=={fits}.*' . in a clone of the package, with a Python without OpenHands"
        )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[-500:] if lines else ""
