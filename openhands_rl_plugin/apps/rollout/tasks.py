"""The task of one episode: from an id, a row, or a file of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject, Task
from openhands_rl_plugin.core.validation import problems, unknown_name
from openhands_rl_plugin.evals.runs.environment_runner import folder_name, indexed_tasks, tasks_of_rows
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.own_suites import own_suite, own_suites
from openhands_rl_plugin.evals.runs.suites import (
    ENDINGS,
    ENVIRONMENT,
    LOCAL,
    Suite,
    find_suite,
    swe_task,
    swe_tasks,
)
from openhands_rl_plugin.evals.swe.dataset import instance_of, read_rows
from openhands_rl_plugin.evals.swe.types import Instance

GivenTask = str | Path | Task | Mapping[str, JsonValue]
"""An id, a file, a task, or a row of a data set."""

_COLUMNS = ("instance_id", "base_commit")
_ROWS = "rows"
_SPLIT = "test"


class FoundTask(NamedTuple):
    """The task, its suite, and the settings that name its environment."""

    suite: Suite
    entry: EvalTask
    settings: RLSettings


def find_task(source: GivenTask, options: PlayOptions, settings: RLSettings) -> FoundTask:
    """The one task that is meant. Raises ``ConfigError`` for none, and for several."""
    if isinstance(source, Task):
        return _of_task(source, settings)
    if isinstance(source, Mapping):
        return _each(({**source},), settings)[0]
    text = str(source)
    if isinstance(source, Path) or text.endswith(ENDINGS) or Path(text).is_file():
        return _of_rows(tuple(read_rows(Path(source))), options.id, text, settings)
    return _of_id(text, options.suite, settings)


def tasks_of_file(file: Path) -> tuple[EvalTask, ...]:
    """The tasks of a file whose rows say themselves where they are played. Raises ``ConfigError``."""
    rows = tuple(read_rows(file))
    for number, row in enumerate(rows, start=1):
        if not all(column in row for column in _COLUMNS) and not {"id", "environment"} <= row.keys():
            raise ConfigError(f"{file}: row {number} has neither {' and '.join(_COLUMNS)} nor id and environment")
    return tuple(each.entry for each in _each(rows, RLSettings()))


def _of_rows(rows: Sequence[JsonObject], wanted: str, file: str, settings: RLSettings) -> FoundTask:
    """The row with the id, or the only one."""
    found = _each(rows, settings)
    ids = [each.entry.task.id for each in found]
    if wanted:
        if ids.count(wanted) != 1:
            raise ConfigError(_shortened(f"{file}: {unknown_name('task', wanted, ids)}"))
        return found[ids.index(wanted)]
    if not found:
        raise ConfigError(f"{file}: no task in it")
    if len(found) > 1:
        raise ConfigError(f"{file} has {len(found)} tasks ({', '.join(ids[:2])}, ...): choose one with --id")
    return found[0]


def _each(rows: Sequence[JsonObject], settings: RLSettings) -> list[FoundTask]:
    """Rows of SWE-bench's columns, tasks as JSON, or rows of the environment of ``[rl]``."""
    name = settings.env_name
    plain = tasks_of_rows(name, rows, _SPLIT)
    found: list[FoundTask] = []
    for number, row in enumerate(rows):
        if all(column in row for column in _COLUMNS):
            suite = Suite(name=_ROWS, dataset=_ROWS, split=_SPLIT)
            found.append(_of_instance(instance_of(row), suite, settings))
        elif {"id", "environment"} <= row.keys() <= Task.model_fields.keys():
            found.append(_of_task(_task_of(row), settings))
        else:
            found.append(FoundTask(_environment(name), plain[number], settings))
    return found


def _task_of(row: JsonObject) -> Task:
    try:
        return Task.model_validate(row)
    except ValidationError as error:
        at, what = next(iter(problems(error, Task)))
        raise ConfigError(f"the task: {'.'.join(at)}: {what}") from error


def _of_task(task: Task, settings: RLSettings) -> FoundTask:
    """A task of a suite of repositories is the one of that id; others are given to their environment as they are."""
    if task.environment in _here():
        return _of_id(task.id, task.environment, settings)
    settings = settings.model_copy(
        update={"env_name": task.environment} if task.environment != settings.env_name else {}
    )
    return FoundTask(_suite_of(settings), EvalTask(task, {**task.data}), settings)


def _of_id(wanted: str, suite: str, settings: RLSettings) -> FoundTask:
    if environment := _environment_of(wanted, suite, settings):
        name, index = environment
        chosen = _at(settings, name)
        return FoundTask(_suite_of(chosen), _indexed(name, index), chosen)
    instances = [found for name in ((suite,) if suite else _here()) for found in _instances(name)]
    found = next((each for each in instances if each[1].instance_id == wanted), None)
    if found is None:
        raise ConfigError(_unknown(wanted, suite, [each.instance_id for _, each in instances]))
    return _of_instance(found[1], found[0], settings)


def _environment_of(wanted: str, suite: str, settings: RLSettings) -> tuple[str, int] | None:
    """The environment and the task's number of ``17`` and ``webshop-17``."""
    named, _, number = wanted.rpartition("-")
    if not number.isdecimal() or suite not in ("", ENVIRONMENT, *_served()):
        return None
    if not named:
        return (suite if suite in _served() else settings.env_name, int(number))
    name = next((each for each in (settings.env_name, *_served()) if folder_name(each) == named), None)
    return None if name is None else (name, int(number))


def _at(settings: RLSettings, environment: str) -> RLSettings:
    """The settings with another environment, which has none of the options of the one that they name."""
    if environment == settings.env_name:
        return settings
    return settings.model_copy(update={"env_name": environment, "environment": {}})


def _indexed(environment: str, index: int) -> EvalTask:
    """The index of the environment's task; of the embedded shop's, with its split."""
    own = own_suite(environment)
    if own is None:
        return indexed_tasks(environment, (index,), _SPLIT)[0]
    goals = own.tasks("all")
    found = next((each for each in goals if each.task.data["idx"] == index), None)
    if found is None:
        raise ConfigError(f"{environment} has no task {index}; it has 0 to {len(goals) - 1}")
    return found


def _instances(name: str) -> list[tuple[Suite, Instance]]:
    """All instances of a suite of repositories, of all splits where they are here."""
    suite = find_suite(name, "all" if name in _here() else None)
    if not suite.software:
        raise ConfigError(f"--suite {name}: a task of an environment is given by its number, or as a row of a file")
    return [(suite, entry.instance) for entry in swe_tasks(suite) if entry.instance is not None]


def _of_instance(instance: Instance, suite: Suite, settings: RLSettings) -> FoundTask:
    own = str(instance.extra.get("split") or suite.split)
    suite = suite.model_copy(update={"split": own})
    return FoundTask(suite, swe_task(instance, suite), settings)


def _environment(name: str) -> Suite:
    return find_suite(ENVIRONMENT).of_environment(name)


def _suite_of(settings: RLSettings) -> Suite:
    """The suite of its own that the environment has, unless the settings name a server."""
    served = {"env_port", "env_server_base"} & settings.model_fields_set or "base_url" in settings.environment
    return (
        find_suite(settings.env_name)
        if settings.env_name in _served() and not served
        else _environment(settings.env_name)
    )


def _unknown(wanted: str, suite: str, ids: Sequence[str]) -> str:
    if suite:
        return _shortened(unknown_name("task", wanted, ids))
    goals = "".join(f"{each}-N, " for each in _served())
    where = f"the number of a task of [rl] env_name, {goals}an id of {', '.join(_here())}, or a file of rows"
    nearest = re.search(r"did you mean .*?\?", unknown_name("task", wanted, ids))
    return f"unknown task {wanted!r};{f' {nearest[0]}' if nearest else ''} give {where}"


def _here() -> tuple[str, ...]:
    """Suites with tests whose rows are here."""
    return (LOCAL, *(each.suite.name for each in own_suites() if each.suite.software))


def _served() -> tuple[str, ...]:
    """Suites that bring their environment."""
    return tuple(each.suite.name for each in own_suites() if not each.suite.software)


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}..."
