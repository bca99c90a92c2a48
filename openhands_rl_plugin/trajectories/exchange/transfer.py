"""Streams a store into a sink, and a source into a store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import batched

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.judgements import labels_of, preferences
from openhands_rl_plugin.core.protocols import TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart, Label, NodeMark, TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_trajectory, redact_value
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.exchange.episodes import Imported, ImportedWithLabels, resolved
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, LeftOutError
from openhands_rl_plugin.trajectories.exchange.formats import Files
from openhands_rl_plugin.trajectories.exchange.reading import Source
from openhands_rl_plugin.trajectories.exchange.writing import Sink

# Episodes in memory at a time, which share a flush of the store.
_BATCH = 16

Advanced = Callable[[int], None]


@dataclass
class ExportReport:
    """Counts of an export. ``left_out``: reason -> how many."""

    trajectories: int = 0
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass
class ImportReport:
    """Counts of an import. ``bad`` has the place and the fault of each record that could not be read."""

    records: int = 0
    new: int = 0
    scores: int = 0
    bad: list[str] = field(default_factory=list)


async def export_store(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    rows: Files,
    sink: Sink,
    *,
    wanted: bool | None = None,
    compares: bool = False,
    labelled: bool = False,
    advanced: Advanced = lambda done: None,
) -> ExportReport:
    """Write the matches, without secrets. ``wanted`` keeps the resolved (or unresolved) ones only; ``compares`` gives
    each those of the other matches that people found worse; ``labelled`` rows get a column with the episode's labels.

    ``where.limit`` counts what is written. ``advanced`` is called with how many trajectories were read.
    """
    report = ExportReport()
    looked = 0
    every = where.model_copy(update={"limit": None})
    worse = await _worse(storage, every) if compares else {}
    async with aclosing(_found(storage, every)) as found:
        async for trajectory, scores in found:
            if report.trajectories == where.limit:
                break
            looked += 1
            if wanted is None or resolved(trajectory, scores) is wanted:
                losers = TrajectoryFilter(ids=worse.get(trajectory.id, ()))
                labels = await labels_of(storage, [trajectory.id]) if labelled else ()
                beaten = [redact_trajectory(other) async for other, _ in storage.find(losers)] if losers.ids else []
                made = partial(rows, redact_trajectory(trajectory), [*map(redact_value, scores)], beaten)
                _write(made, [*map(redact_value, labels)], sink, report)
            advanced(looked)
    return report


async def _found(
    storage: TrajectoryStorage, where: TrajectoryFilter
) -> AsyncGenerator[tuple[Trajectory, tuple[Score, ...]]]:
    async for pair in storage.find(where):
        yield pair


async def _worse(storage: TrajectoryStorage, where: TrajectoryFilter) -> dict[str, tuple[str, ...]]:
    """Episode -> those that people found worse than it."""
    ids = [summary.id async for summary in storage.summaries(where)]
    known = frozenset(ids)
    worse: dict[str, tuple[str, ...]] = {}
    for both, better in preferences(await labels_of(storage, ids)).items():
        if better is not None and both <= known:
            worse[better] = (*worse.get(better, ()), *(both - {better}))
    return worse


def _write(
    rows: Callable[[], Iterator[tuple[str, JsonObject]]], labels: Sequence[Label], sink: Sink, report: ExportReport
) -> None:
    try:
        # All rows of an episode or none: one that is left out leaves nothing behind.
        made = list(rows())
    except LeftOutError as reason:
        report.left_out[str(reason)] += 1
        return
    for name, row in made:
        said: list[JsonValue] = [label.model_dump(mode="json") for label in labels]
        sink.write(name, {**row, "labels": said} if said else row)
        report.rows += 1
    report.trajectories += 1


async def import_source(
    source: Source, storage: TrajectoryStorage, *, advanced: Advanced = lambda done: None
) -> ImportReport:
    """Store every record that can be read, once; the report names the others."""
    report = ImportReport()
    for batch in batched(_episodes(source, advanced, report), _BATCH):
        await _store(batch, storage, report)
    return report


def _episodes(source: Source, advanced: Advanced, report: ImportReport) -> Iterator[Imported]:
    for unit in source.units:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "import"):
                found = unit.read()
        except (ExchangeError, CaughtFailure) as error:
            report.bad.append(str(error) if str(error).startswith(unit.at) else f"{unit.at}: {error}")
        else:
            report.records += 1
            yield from found if isinstance(found, list) else [found]
        advanced(unit.done)


async def _store(batch: Sequence[Imported], storage: TrajectoryStorage, report: ImportReport) -> None:
    episodes: dict[str, Trajectory] = {}
    for found in (each.trajectory for each in batch):
        if found.id not in episodes or _goes_on(episodes[found.id], found):
            episodes[found.id] = found
    known: dict[str, Trajectory] = {}
    judged: dict[str, set[str]] = {}
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=tuple(episodes), finished=None)):
        known[trajectory.id], judged[trajectory.id] = trajectory, set(map(_as_stored, scores))
    fresh = [each for identity, each in episodes.items() if identity not in known]
    further = [each for identity, each in episodes.items() if identity in known and _goes_on(known[identity], each)]
    await asyncio.gather(*(_add(each, known.get(each.id), storage) for each in (*fresh, *further)))
    report.new += len(fresh)
    scores = [score for each in batch for score in _new_scores(each, judged)]
    await storage.add_scores(scores)
    report.scores += len(scores)
    if isinstance(storage, TakesLabels):
        await storage.add_labels(
            [label for each in batch if isinstance(each, ImportedWithLabels) for label in each.labels]
        )


def _goes_on(known: Trajectory, found: Trajectory) -> bool:
    """Whether ``found`` is the same episode at a later time."""
    ended = found.stop is not StopReason.UNFINISHED
    return known.stop is StopReason.UNFINISHED and (ended or len(found.nodes) > len(known.nodes))


def _new_scores(found: Imported, judged: dict[str, set[str]]) -> list[Score]:
    """The scores that the store does not have; ``judged`` takes note of them."""
    identity = found.trajectory.id
    before = judged.setdefault(identity, set())
    new = [score for score in found.scores if _as_stored(score) not in before]
    before.update(map(_as_stored, new))
    return new


def _as_stored(score: Score) -> str:
    # As text, because a NaN is not equal to itself.
    return redact_value(score).model_dump_json()


async def _add(trajectory: Trajectory, known: Trajectory | None, storage: TrajectoryStorage) -> None:
    if trajectory.stop is not StopReason.UNFINISHED:
        await storage.add(trajectory)
        return
    await storage.begin(EpisodeStart.of(trajectory))
    marks = tuple(
        NodeMark(
            index=at,
            reward=node.reward,
            simulated=node.simulated,
            value=node.value,
            visits=node.visits,
            search=node.metadata.get("search"),
        )
        for at, node in enumerate(trajectory.nodes[: len(known.nodes) if known is not None else 0])
    )
    await storage.grow(
        EpisodeGrowth(trajectory_id=trajectory.id, first=0, nodes=trajectory.nodes, head=trajectory.head, marks=marks)
    )
