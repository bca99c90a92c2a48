"""``openhands-rl rollout`` as a program, for trainers whose Python has no OpenHands: its command and its output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

VARIABLE = "OPENHANDS_RL_PYTHON"
"""The environment variable that names the Python with OpenHands."""
SECRET = "OPENHANDS_RL_ROLLOUT_SECRET"
"""The environment variable with the key of the one rollout's endpoint."""
STORE = "episodes"
"""The store of an episode that the trainer records, in the working folder, which goes with it."""


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
    """``openhands-rl rollout`` of the task that the options ``task`` choose, against an endpoint that records it.

    ``options``: fields of ``PlayOptions``. Paths are those of this process; the program has another working folder.
    The endpoint's key is in the variable ``SECRET``. ``base_model``: where it is not ``model`` itself. ``token_ids``:
    ask for them, where the endpoint keeps none itself.
    """
    words = [python, "-P", "-m", "openhands_rl_plugin", "rollout", *task, "--json", "--token-ids", _word(token_ids)]
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
        played = PlayedRollout.model_validate(printed, strict=False)
    except (ValueError, ValidationError, LookupError, TypeError):
        said = last_line(stderr) or last_line(stdout) or "it said nothing"
        return f"infrastructure: openhands-rl rollout ended with exit code {exit_code}: {said}"
    return played if played.failure is None else f"{played.failure.kind.value}: {played.failure.message}"


def facts_of(played: PlayedRollout) -> JsonObject:
    """What a trace keeps of an episode beside its messages and tokens."""
    kept = {"trajectory_id", "task_id", "environment", "reward", "reward_version", "resolved", "stop", "cut_short"}
    return played.model_dump(mode="json", include={*kept, "off_policy", "turns", "seconds"})


def last_line(text: str) -> str:
    """The last line that is not empty, shortened."""
    lines = text.strip().splitlines()
    return lines[-1].strip()[-500:] if lines else ""
