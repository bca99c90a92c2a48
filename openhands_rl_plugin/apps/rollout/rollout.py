"""One finished episode as a trainer needs it, and rolled out by the Python that has OpenHands.

It has the reward, and the training sequences with ids, mask and logprobs. Trainers whose own Python has no OpenHands
call ``roll_out``; this module imports neither.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Literal

from openhands_rl_plugin.core.types import (
    Failure,
    Frozen,
    JsonObject,
    Message,
    PolicyRef,
    Sample,
    StopReason,
    StrategySpec,
    Usage,
)
from openhands_rl_plugin.environments.workspace.processes import kill, start

PROGRAM = "openhands_rl_plugin.cli.rollout"
VARIABLE = "OPENHANDS_RL_PYTHON"
"""The environment variable that names the Python with OpenHands."""
_SECRET = "OPENHANDS_RL_ROLLOUT_SECRET"
_SECONDS, _GRACE = 7200.0, 60.0
"""An episode's default time limit, and the program's extra time after it to report why the episode ended."""
TIMED_OUT = "rollout.timeout"
"""The boundary of the failure of an episode that was not over in time."""


class PlayedRollout(Frozen):
    """One episode. With a ``failure`` it is no sample of the policy: no reward, no segments, and never one of 0.

    ``segments``: the training sequences in order, several where a prompt did not extend the one before; all of them
    have the episode's reward, and the episode counts once in a baseline, however many there are. ``off_policy``: how
    answers were sampled, where not from the policy at a temperature (empty: they may be reinforced). ``shortened``:
    what came after a secret is left out. ``cut_short``: a limit ended it. ``resolved``: the verdict of the tests of a
    repository task, or of an environment's criterion. ``seconds`` of wall time. Without ``usage`` nothing was sampled.
    """

    schema_version: Literal[1] = 1
    trajectory_id: str
    run_id: str
    group_id: str
    task_id: str
    environment: str
    strategy: StrategySpec
    policy: PolicyRef
    reward: float | None = None
    reward_version: str = ""
    resolved: bool | None = None
    stop: StopReason
    cut_short: bool = False
    failure: Failure | None = None
    segments: tuple[Sample, ...] = ()
    off_policy: str = ""
    shortened: bool = False
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    turns: int = 0
    usage: Usage = Usage()
    seconds: float = 0.0


async def roll_out(
    task: str, options: Mapping[str, object], *, key: str = "none", store: object = "", python: str = ""
) -> PlayedRollout | str:
    """One episode by ``python -m openhands_rl_plugin.cli.rollout``; or why there is none that may be trained on.

    ``task``: an id, or a row as JSON. ``options``: fields of ``PlayOptions``, which name the endpoint; ``key`` is its
    key. ``store`` keeps the episode; else it goes with its process. ``python``: by default what ``VARIABLE`` names,
    else this one. The reason is one line, and begins with the kind of the failure. The program and all that it started
    are killed a minute after the episode's ``timeout``, and with the task that waits for it.
    """
    row, seconds = task.lstrip().startswith("{"), float(str(options.get("timeout", _SECONDS))) + _GRACE
    python = python or os.environ.get(VARIABLE) or sys.executable
    words = [python, "-P", "-m", PROGRAM, "--task", "-" if row else task, "--api-key-env", _SECRET]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value).lower() if isinstance(value, bool) else str(value)]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--store", str(store or f"{folder}/episodes")]
        process = await start(*words, env={**os.environ, _SECRET: key})
        try:
            printed = await asyncio.wait_for(process.communicate(task.encode() if row else b""), seconds)
        except TimeoutError:
            return f"infrastructure: the episode's program did not end within {seconds:g} s"
        finally:
            await kill(process)
    try:
        if (failure := (found := json.loads(printed[0]))["failure"]) is None:
            return PlayedRollout.model_validate(found, strict=False)
        return f"{failure['kind']}: {failure['message']}"
    except (ValueError, LookupError, TypeError):
        last = (printed[1] or printed[0]).decode(errors="replace").strip().splitlines()[-1:]
        why = last[0][-500:] if last else "it printed nothing"
        return f"infrastructure: {python} -m {PROGRAM} ended with exit code {process.returncode}: {why}"
