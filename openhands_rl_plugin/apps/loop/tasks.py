"""Scripted demonstrations of a suite: entry points of the group ``openhands_rl_plugin.demonstrators``, by its name."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.runs.plan import select
from openhands_rl_plugin.evals.runs.suites import (
    ENDINGS,
    FILE_SPLITS,
    LOCAL,
    EvalTask,
    Suite,
    find_suite,
    has_splits,
    own_suite,
    tasks_of,
)
from openhands_rl_plugin.evals.swe.instances import read_instances

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.training.loop.loop import Lessons


class Demonstrator:
    """Rolls out the tasks of a suite by a script."""

    def check(self, settings: RLSettings) -> None:
        """Raise ``ConfigError`` where the script does not work with these settings."""

    def open(self, job: LoopJob, storage: TrajectoryStorage) -> AbstractAsyncContextManager[EpisodeRunner]:
        """The runner of the demonstrations, until the block ends."""
        raise NotImplementedError

    def lessons(self, job: LoopJob) -> Lessons | None:
        """Which parts of the episodes are imitated; ``None``: all. Raises ``ConfigError``."""
        return None


def demonstrator_of(suite: str) -> Demonstrator | None:
    """The demonstrator of the suite of that name. Raises ``ConfigError`` for one that cannot be loaded."""
    return registry.find("demonstrators", suite) if suite in registry.names("demonstrators") else None


_HELD_OUT_ORDER = 20_240  # an arbitrary constant: runs with any seed are evaluated on the same tasks


class TaskSource(Frozen):
    """The source of tasks. ``count``: the environment's tasks are the indices below it; ``rows``: a file of tasks.

    Without ``held_out_rows``, and where the suite has no held-out split, the held-out tasks are taken from the same
    source. Their split is always ``heldout``, by which ``openhands-rl train`` recognises their episodes. ``include``
    and ``exclude`` (ids or patterns) and ``limit`` apply to the training tasks; with none of them the suite's further
    tasks are among these.
    """

    suite: str
    split: str | None = None
    rows: Path | None = None
    held_out_rows: Path | None = None
    count: int | None = Field(default=None, ge=1)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = Field(default=None, ge=1)


class LoopTasks(NamedTuple):
    """The tasks of a run: for demonstrations, for training, and held out for evaluation only."""

    suite: Suite
    demonstrations: tuple[EvalTask, ...]
    training: tuple[EvalTask, ...]
    held_out: tuple[EvalTask, ...]

    @property
    def entries(self) -> tuple[EvalTask, ...]:
        """All of them."""
        return (*self.demonstrations, *self.training, *self.held_out)


def loop_tasks(source: TaskSource, settings: RLSettings) -> LoopTasks:
    """The tasks in the order of the run's seed. Raises ``ConfigError`` for a suite that has too few."""
    splits = _splits(source)
    suite = find_suite(source.suite, source.split or (splits[0] if splits else None))
    entries = tasks_of(suite, settings.env_name, source.count, source.rows)
    pool = [*select(entries, lambda entry: entry.task.id, source.include, source.exclude)]
    if source.held_out_rows is not None:
        others = tasks_of(suite, settings.env_name, None, source.held_out_rows)
        held_out = _apart(suite, others)[: settings.loop.held_out]
    elif splits:
        others = tasks_of(suite.model_copy(update={"split": splits[1]}), settings.env_name, None)
        held_out = _shuffled(others, _HELD_OUT_ORDER)[: settings.loop.held_out]
    else:
        order = _shuffled(pool, _HELD_OUT_ORDER)
        held_out, pool = order[: settings.loop.held_out], order[settings.loop.held_out :]
    pool = _shuffled(pool, settings.sampling.seed)[: source.limit]
    scripted = settings.loop.demonstrations
    training, own = pool[scripted:], own_suite(suite.name)
    if own is not None and own.further and not (source.include or source.exclude or source.limit):
        further = _shuffled(own.tasks(own.further), settings.sampling.seed)
        training = _shuffled([*training, *further], settings.sampling.seed)
    tasks = LoopTasks(suite, tuple(pool[:scripted]), tuple(training), _measured(held_out))
    _check(tasks, settings)
    return tasks


def measured_tasks(source: TaskSource, settings: RLSettings, most: int) -> LoopTasks:
    """Tasks of which all are held out, ``most`` of them at most and always the same ones. Raises ``ConfigError``."""
    splits = _splits(source)
    suite = find_suite(source.suite, splits[1] if splits else None)
    entries = _shuffled(tasks_of(suite, settings.env_name, source.count, source.rows), _HELD_OUT_ORDER)
    return LoopTasks(suite, (), (), _measured(entries[:most]))


def _splits(source: TaskSource) -> tuple[str, str] | None:
    """The splits for training and held out: the suite's, or those that the rows of a file name."""
    if source.rows is not None:
        return None
    named = source.suite.endswith(ENDINGS) and source.split is None and source.held_out_rows is None
    if named and has_splits(read_instances(Path(source.suite))):
        return FILE_SPLITS
    if source.suite == LOCAL:
        return FILE_SPLITS
    own = own_suite(source.suite)
    return own.splits if own is not None else None


def _apart(suite: Suite, entries: tuple[EvalTask, ...]) -> list[EvalTask]:
    """The held-out tasks with ids of their own: in every file, the rows of an environment are numbered from 0."""
    if suite.software:
        return [*entries]
    return [entry._replace(task=entry.task.model_copy(update={"id": f"{entry.task.id}-held-out"})) for entry in entries]


def _measured(entries: Sequence[EvalTask]) -> tuple[EvalTask, ...]:
    return tuple(entry._replace(task=entry.task.model_copy(update={"split": HELD_OUT})) for entry in entries)


def _check(tasks: LoopTasks, settings: RLSettings) -> None:
    loop = settings.loop
    if not tasks.training or not tasks.held_out:
        raise ConfigError(
            f"too few tasks: {len(tasks.training)} to train on, {len(tasks.held_out)} held out, "
            f"{len(tasks.demonstrations)} for demonstrations; give more, or lower loop.held_out ({loop.held_out})"
        )
    script = demonstrator_of(tasks.suite.name)
    if loop.demonstrations and script is None:
        scripted = ", ".join(registry.names("demonstrators")) or "those of other packages"
        raise ConfigError(f"--demonstrations: {tasks.suite.name} has no scripted ones, only {scripted}; leave it at 0")
    if loop.demonstrations and script is not None:
        script.check(settings)
    both = {_what(tasks.suite, entry) for entry in (*tasks.demonstrations, *tasks.training)} & {
        _what(tasks.suite, entry) for entry in tasks.held_out
    }
    if both:
        raise ConfigError(
            f"{len(both)} tasks would be trained on and held out too, {min(both):.80} for one: give other rows"
        )


def _what(suite: Suite, entry: EvalTask) -> str:
    if suite.software:
        return entry.task.id
    data = entry.task.data
    return json.dumps(data.get("row", data.get("idx")), sort_keys=True)


def _shuffled(entries: list[EvalTask] | tuple[EvalTask, ...], seed: int) -> list[EvalTask]:
    order = list(entries)
    random.Random(seed).shuffle(order)
    return order
