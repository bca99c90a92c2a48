"""The origin and validation of every task of a file, in ``.lineage.json`` next to it. It has no dates, so that equal
tasks have equal lineage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import file_sha256, write_file
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.dataset import read_instances, row_of
from openhands_rl_plugin.evals.swe.types import Instance

SCHEMA_VERSION = 1


class Validation(Frozen):
    """The runs that a task was accepted on: how often the tests ran without the bug and with it, how many tests there
    are, and how many of them fail with the bug.
    """

    runs_without_bug: int
    runs_with_bug: int
    tests: int
    failing: int


class Check(Frozen):
    """The result of the quality gate. ``oracle`` and ``no_op``: how often the gold patch, and a patch without effect,
    resolved the task in ``repeats`` runs each.
    """

    repeats: int
    oracle: int
    no_op: int
    same_outcomes: bool
    duplicate_of: str = ""
    pass_rate: float | None = None
    problems: tuple[str, ...] = ()


class TaskLineage(Frozen):
    """One task. ``source`` as in its row; ``function`` is where the bug is, ``path`` in which file."""

    instance_id: str
    source: JsonObject
    modifier: str = ""
    seed: int | None = None
    path: str = ""
    function: str = ""
    validation: Validation | None = None
    check: Check | None = None


class TasksLineage(Frozen):
    """All tasks of a file, or none where its rows say what they are. ``sha256`` is that of the file; ``checked``: it
    passed the gate, with ``backend``.
    """

    schema_version: int = SCHEMA_VERSION
    sha256: str
    checked: bool = False
    backend: str = ""
    pass_rate_window: tuple[float, float] | None = None
    tasks: tuple[TaskLineage, ...] = Field(default=())


def lineage_path(tasks: Path) -> Path:
    """``tasks.jsonl`` -> ``tasks.lineage.json``."""
    return tasks.with_name(f"{tasks.stem}.lineage.json")


def read_lineage(tasks: Path) -> TasksLineage | None:
    """The lineage of a file of tasks; ``None`` when it has none. Raises ``ConfigError`` for one that is damaged."""
    path = lineage_path(tasks)
    try:
        return TasksLineage.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        again = f"make it again: openhands-rl tasks check {tasks}"
        raise ConfigError(f"{path} cannot be read as a lineage; {again}") from error


def require_checked(path: Path) -> tuple[Instance, ...]:
    """The tasks of a file that passed the quality gate. Raises ``ConfigError`` when it did not, or changed since."""
    instances, lineage = read_instances(path), read_lineage(path)
    again = f"run: openhands-rl tasks check {path}"
    if lineage is None:
        raise ConfigError(f"{path} was never checked; {again}")
    if lineage.sha256 != file_sha256(path):
        raise ConfigError(f"{path} has changed since its lineage was written; {again}")
    if not lineage.checked:
        bad = sum(bool(task.check is None or task.check.problems) for task in lineage.tasks)
        raise ConfigError(f"{path} did not pass the quality gate ({bad} of {len(instances)} tasks); {again}")
    return instances


def write_tasks(path: Path, instances: Sequence[Instance], tasks: Sequence[TaskLineage]) -> None:
    """Write the rows and their lineage, each atomically. Raises ``StorageError``."""
    rows = "".join(json.dumps(row_of(each), ensure_ascii=False) + "\n" for each in instances)
    write_file(path, rows, parents=True)
    write_lineage(path, TasksLineage(sha256=file_sha256(path), tasks=tuple(tasks)))


def write_lineage(tasks: Path, lineage: TasksLineage) -> None:
    """Write the lineage of a file of tasks."""
    write_file(lineage_path(tasks), lineage.model_dump_json(indent=1, exclude_none=True) + "\n")
