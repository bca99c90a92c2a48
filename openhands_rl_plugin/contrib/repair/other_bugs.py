"""Further training tasks: other bugs in the functions of the tasks that there are.

A row of ``repair.more.jsonl`` says what of a function's text changes; the function and its tests are those of a task of
``repair.jsonl``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.contrib.repair.edits import LineEdit, patch_of
from openhands_rl_plugin.contrib.repair.oracle import fixed_text
from openhands_rl_plugin.contrib.repair.rows import COLUMN, MORE, Level, at_level, data_file, repair_instances, spec_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.types import Instance


class OtherBug(Frozen):
    """``edit`` puts a bug of that ``kind`` into the function of the task ``of`` without its own. ``failing``: which of
    the shown calls detect it, from 0. ``commit``: of the repository with it."""

    of: str
    kind: str
    edit: LineEdit
    failing: tuple[int, ...]
    commit: str


def more_instances(level: Level, file: Path | None = None) -> tuple[Instance, ...]:
    """The tasks of the split ``more``. Raises ``ConfigError`` where a row is not as it should be."""
    return tuple(at_level(each, level) for each in _instances(file or data_file("repair.more.jsonl")))


@functools.lru_cache(maxsize=1)
def _instances(file: Path) -> tuple[Instance, ...]:
    return tuple(_read(file))


def _read(file: Path) -> Iterator[Instance]:
    known = {each.instance_id.removesuffix("-3"): each for each in repair_instances(3, "train")}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            bug = OtherBug.model_validate_json(line)
            instance = known[bug.of]
            name = f"{instance.repo}-{spec_of(instance).function}-{MORE}-{number}"
            yield with_bug(instance, bug, name)
        except (KeyError, IndexError, ValidationError) as error:
            raise ConfigError(f"{file}: line {number} is no bug of a repair task") from error


def with_bug(instance: Instance, bug: OtherBug, name: str) -> Instance:
    """The task with this bug in place of its own, under that name."""
    spec = spec_of(instance)
    right = fixed_text(instance)
    lines = right.split("\n")
    lines[bug.edit.first - 1 : bug.edit.last] = bug.edit.lines
    wrong = "\n".join(lines)
    changed = {"kind": bug.kind, "line": bug.edit.first, "files": {**spec.files, spec.path: wrong}}
    file = instance.fail_to_pass[0].partition("::")[0]
    tests = [f"{file}::test_{at + 1}" for at in range(spec.shown)]
    return instance.model_copy(
        update={
            "instance_id": name,
            "base_commit": bug.commit,
            "patch": patch_of(spec.path, wrong, right),
            "fail_to_pass": tuple(tests[at] for at in bug.failing),
            "pass_to_pass": tuple(test for at, test in enumerate(tests) if at not in bug.failing),
            "extra": {
                **instance.extra,
                "split": MORE,
                COLUMN: spec.model_copy(update=changed).model_dump(mode="json"),
            },
        }
    )
