"""Reads runs for reports: of this package and of OpenHands' evaluation, whose lines have fewer fields.

Scores of a verifier are read from the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field, JsonValue, ValidationError

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score
from openhands_rl_plugin.evals.runs.outcome import Outcome, is_stuck
from openhands_rl_plugin.evals.runs.run_files import METADATA, OUTPUT, read_rows
from openhands_rl_plugin.evals.swe.types import VerdictKind

_RUN = re.compile(r"(?P<name>.+)-run_(?P<index>\d+)\Z")


class RunRecord(Frozen):
    """One run. ``name`` is that of its folder without the number; ``metadata`` is OpenHands'."""

    name: str
    index: int
    directory: Path
    metadata: JsonObject = Field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()


def read_runs(paths: tuple[Path, ...]) -> tuple[RunRecord, ...]:
    """The runs at ``paths``: folders of runs, ``output.jsonl`` files, or folders that hold runs at any depth.

    Raises ``ConfigError`` for a path without runs and for lines that are no output of an evaluation.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        found = [path] if path.is_file() else sorted(path.rglob(OUTPUT))
        if not found:
            raise ConfigError(f"{path}: there is no {OUTPUT} in it, so no run of an evaluation")
        files += [file for file in found if file not in files]
    return tuple(_run(file, at) for at, file in enumerate(files))


def read_metadata(file: Path) -> JsonObject:
    """``metadata.json``; empty where there is none. Raises ``ConfigError``."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    return read if isinstance(read, dict) else {}


def outcome_of_row(row: JsonObject, run: int = 0) -> Outcome:
    """The attempt in a line of ``output.jsonl``. Fields that OpenHands' harness does not write keep their defaults.

    Raises ``ConfigError``.
    """
    result = json_object(row.get("test_result"))
    own = result.get("outcome")
    try:
        return Outcome.model_validate(own) if isinstance(own, dict) else _foreign(row, result, run)
    except ValidationError as error:
        raise ConfigError(f"{row['instance_id']}: test_result.outcome is damaged; remove the line") from error


def _run(file: Path, at: int) -> RunRecord:
    directory = file.resolve().parent
    match = _RUN.match(directory.name)
    index = int(match["index"]) if match else at
    return RunRecord(
        name=match["name"] if match else directory.name,
        index=index,
        directory=directory,
        metadata=read_metadata(directory / METADATA),
        outcomes=tuple(outcome_of_row(row, index) for row in read_rows(file)),
    )


def _foreign(row: JsonObject, result: JsonObject, run: int) -> Outcome:
    patch = result.get("git_patch") or result.get("model_patch")
    error = row.get("error")
    history = row.get("history")
    events = [json_object(event) for event in history] if isinstance(history, list) else []
    actions = [event.get("action") for event in events if event.get("source") == "agent" and "action" in event]
    metrics = json_object(row.get("metrics"))
    usage = json_object(metrics.get("accumulated_token_usage"))
    timed_out = isinstance(error, str) and error.startswith("Timeout after")
    cost = metrics.get("accumulated_cost")
    return Outcome(
        instance_id=str(row["instance_id"]),
        run=run,
        kind=_foreign_kind(row, result, bool(str(patch or "").strip()), timed_out),
        reason=error if isinstance(error, str) else "",
        stuck=is_stuck(error),
        timed_out=timed_out,
        empty_patch=not str(patch or "").strip(),
        turns=sum(action != "system" for action in actions),
        prompt_tokens=_whole(usage.get("prompt_tokens")),
        cached_tokens=_whole(usage.get("cache_read_tokens")),
        completion_tokens=_whole(usage.get("completion_tokens")),
        cost=float(cost) if isinstance(cost, int | float) else None,
    )


def _foreign_kind(row: JsonObject, result: JsonObject, patched: bool, timed_out: bool) -> VerdictKind:
    report = json_object(result.get("report") or row.get("report"))
    flags = {
        "error_eval": VerdictKind.INFRASTRUCTURE,
        "resolved": VerdictKind.RESOLVED,
        "empty_generation": VerdictKind.EMPTY_PATCH,
        "failed_apply_patch": VerdictKind.UNAPPLIED,
        "test_timeout": VerdictKind.TIMED_OUT,
    }
    for name, kind in flags.items():
        if report.get(name) is True:
            return kind
    if isinstance(report.get("resolved"), bool):
        return VerdictKind.UNRESOLVED
    if not patched and (row.get("error") is None or timed_out):
        return VerdictKind.EMPTY_PATCH
    return VerdictKind.UNGRADED


def json_object(value: JsonValue) -> JsonObject:
    """``value`` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _whole(value: JsonValue) -> int:
    return value if isinstance(value, int) else 0


VERIFIER = "verifier"
"""The prefix of the ``reward_version`` of verifiers' scores."""

_AT_ONCE = 200


async def with_verifier(
    runs: Sequence[RunRecord], storage: TrajectoryStorage, version: str = VERIFIER
) -> tuple[RunRecord, ...]:
    """The runs with every attempt's newest score whose version begins with ``version``. Raises ``StorageError``."""
    ids = sorted({outcome.trajectory_id for run in runs for outcome in run.outcomes if outcome.trajectory_id})
    scores: dict[str, float] = {}
    for start in range(0, len(ids), _AT_ONCE):
        where = TrajectoryFilter(ids=tuple(ids[start : start + _AT_ONCE]))
        async for trajectory, found in storage.find(where):
            if (score := _newest(found, version)) is not None:
                scores[trajectory.id] = score
    return tuple(
        run.model_copy(
            update={
                "outcomes": tuple(
                    outcome.model_copy(update={"verifier": scores.get(outcome.trajectory_id, outcome.verifier)})
                    for outcome in run.outcomes
                )
            }
        )
        for run in runs
    )


def _newest(scores: Iterable[Score], version: str) -> float | None:
    own = [score.reward for score in scores if score.reward_version.startswith(version) and score.reward is not None]
    return own[-1] if own else None
