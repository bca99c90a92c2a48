"""Our own lossless format: a trajectory with its scores and labels a line. It moves stores, where the user says that a
file is of a store of his own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.types import SCHEMA_VERSION, Frozen, JsonObject, Score, StrategySpec, Trajectory
from openhands_rl_plugin.trajectories.exchange.episodes import SCORE_VERSION, STRATEGY, Imported, ImportedWithLabels
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, what_is_wrong


class Line(Frozen):
    """What a line holds."""

    trajectory: Trajectory
    scores: tuple[Score, ...] = ()
    labels: tuple[Label, ...] = ()


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """A trajectory with its nodes."""
    trajectory = row.get("trajectory")
    return isinstance(trajectory, dict) and "nodes" in trajectory


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One line with everything, tokens included; ``export_store`` adds the labels."""
    yield Line(trajectory=trajectory, scores=tuple(scores)).model_dump(mode="json")


def read(row: JsonObject) -> Imported:
    """The episode as a file of others holds it: no reward reads its evidence, its newest outcome is an import's score,
    and labels are left out. Raises as ``read_own``."""
    found, scores = read_own(row)
    by = StrategySpec(name=STRATEGY, options={"strategy": found.strategy.model_dump(mode="json")})
    newest = newest_outcome(scores)
    kept = () if newest is None else (newest.model_copy(update={"reward_version": SCORE_VERSION}),)
    return Imported(found.model_copy(update={"strategy": by}), kept)


def read_own(row: JsonObject) -> ImportedWithLabels:
    """The same values again. Raises ``ExchangeError``, also for a schema that is newer than this version."""
    held = row.get("trajectory")
    version = held.get("schema_version") if isinstance(held, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ExchangeError(f"schema version {version} is newer than {SCHEMA_VERSION}; install a newer version")
    try:
        line = Line.model_validate(row)
    except ValidationError as error:
        raise ExchangeError(what_is_wrong(error, Line)) from error
    if any(each.trajectory_id != line.trajectory.id for each in (*line.scores, *line.labels)):
        raise ExchangeError("scores or labels: one belongs to another trajectory")
    found = ImportedWithLabels(line.trajectory, line.scores)
    found.labels = line.labels
    return found
