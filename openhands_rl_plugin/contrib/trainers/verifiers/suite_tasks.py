"""The tasks of a suite or a file, each with the options of ``openhands-rl rollout`` that choose it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.apps.rollout.tasks import tasks_of_file
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.suites import (
    ENDINGS,
    ENVIRONMENT,
    environment_tasks,
    find_suite,
    swe_tasks,
)


class SuiteTask(NamedTuple):
    """``instruction`` is what the agent is told first; ``options`` choose the task on the command line."""

    id: str
    instruction: str
    options: tuple[str, ...]


def suite_tasks(suite: str, split: str = "", count: int = 0, wanted: Sequence[str] = ()) -> tuple[SuiteTask, ...]:
    """The tasks of a suite, or of a file of rows; ``wanted``: those with these ids only, in this order.

    ``split``: the suite's own by default, all of a file. ``count``: how many tasks ``environment`` has, which nothing
    else says. Raises ``ConfigError``.
    """
    found = _of_file(suite, split) if suite.endswith(ENDINGS) else _of_suite(suite, split, count)
    by_id = {each.id: each for each in found}
    if len(by_id) < len(found):
        raise ConfigError(f"{suite}: several tasks have the same id")
    if not found:
        raise ConfigError(f"{suite} has no task{f' of the split {split!r}' if split else ''}")
    for name in wanted:
        if name not in by_id:
            raise ConfigError(unknown_name("task", name, by_id)[:400])
    return tuple(by_id[name] for name in wanted) if wanted else found


def _of_file(file: str, split: str) -> tuple[SuiteTask, ...]:
    path = Path(file).absolute()
    entries = [entry for entry in tasks_of_file(path) if split in ("", entry.task.split)]
    return tuple(_chosen(entry, ("--task", str(path), "--id", entry.task.id)) for entry in entries)


def _of_suite(name: str, split: str, count: int) -> tuple[SuiteTask, ...]:
    suite = find_suite(name, split or None)
    if suite.software:
        return tuple(_chosen(entry, ("--task", entry.task.id, "--suite", name)) for entry in swe_tasks(suite))
    if name == ENVIRONMENT and count < 1:
        raise ConfigError("how many tasks has the environment? give --env.taskset.count N, or a file of tasks as suite")
    entries = environment_tasks(suite, "" if name == ENVIRONMENT else name, count)
    numbers = [str(entry.row["idx"]) for entry in entries]
    prefix = "" if name == ENVIRONMENT else f"{name}-"
    return tuple(
        SuiteTask(f"{name}-{number}", entry.task.instruction or f"task {number}", ("--task", f"{prefix}{number}"))
        for entry, number in zip(entries, numbers, strict=True)
    )


def _chosen(entry: EvalTask, options: tuple[str, ...]) -> SuiteTask:
    return SuiteTask(entry.task.id, entry.task.instruction or entry.task.id, options)
