"""Instances: their values and those of grading (verdict, flags), protocols of back ends, and the files of rows and
predictions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.files import is_contained
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.environments.workspace.processes import Ended
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, rows_of


class Instance(Frozen):
    """One task in the columns of SWE-bench. ``extra`` holds the row's other columns (``image``, ``log_parser``,
    ``test_command``, ...) as they were read.
    """

    instance_id: str
    repo: str
    base_commit: str
    version: str = ""
    problem_statement: str = ""
    hints_text: str = ""
    created_at: str = ""
    patch: str = ""
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    environment_setup_commit: str = ""
    extra: JsonObject = Field(default_factory=dict)

    @property
    def test_files(self) -> frozenset[str]:
        """The files of the row's tests whose names contain them (``file.py::test``)."""
        names = (*self.fail_to_pass, *self.pass_to_pass)
        return frozenset(name.partition("::")[0] for name in names if ".py::" in name)


class VerdictKind(StrEnum):
    """The result of an attempt. Only the first two come from its tests; the others are not "unresolved"."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    UNAPPLIED = "unapplied"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """Too large, binary without its data, or not a patch at all."""
    INFRASTRUCTURE = "infrastructure"
    """The infrastructure failed: nothing is known about the patch."""
    FAILED = "failed"
    """The episode failed because of the model server or the environment: nothing is known about the agent."""
    UNGRADED = "ungraded"


UNKNOWN = frozenset({VerdictKind.INFRASTRUCTURE, VerdictKind.FAILED, VerdictKind.UNGRADED})
"""Kinds that say nothing about the agent: counted, but excluded from success rates."""


class TestsStatus(Frozen):
    """The passed and failed tests of FAIL_TO_PASS or PASS_TO_PASS."""

    __test__ = False  # no test class for pytest

    success: tuple[str, ...] = ()
    failure: tuple[str, ...] = ()


class Severity(StrEnum):
    """The effect of a flag. ``NOTE`` is about a limit of the guard itself."""

    DECIDES = "decides"
    """The patch is not resolved, whatever its tests say."""
    COUNTED = "counted"
    """Honest patches match too: it counts in the flagged share, and the tests decide."""
    NOTE = "note"


class Flag(Frozen):
    """A sign of reward hacking: the rule, where it matched, and the matching text."""

    rule: str
    where: str
    detail: str = ""
    severity: Severity = Severity.DECIDES


class PatchVerdict(Frozen):
    """The result of grading one patch. ``seconds`` is the wall time of grading, ``test_seconds`` of the tests."""

    instance_id: str
    kind: VerdictKind
    reason: str = ""
    fail_to_pass: TestsStatus = TestsStatus()
    pass_to_pass: TestsStatus = TestsStatus()
    flags: tuple[Flag, ...] = ()
    seconds: float = 0.0
    test_seconds: float = 0.0
    logs: str | None = None
    """The folder with ``patch.diff``, ``eval.sh``, ``test_output.txt`` and ``report.json``."""

    @property
    def resolved(self) -> bool:
        """Whether all FAIL_TO_PASS and PASS_TO_PASS tests passed without a deciding flag."""
        return self.kind is VerdictKind.RESOLVED

    @property
    def flagged(self) -> tuple[str, ...]:
        """The rules that matched the patch or its run, without duplicates."""
        return tuple(sorted({flag.rule for flag in self.flags if flag.severity is not Severity.NOTE}))


class Box(Protocol):
    """A running container or sandbox with the instance's repository at ``/testbed``, after set-up."""

    async def run(
        self, command: Sequence[str], *, timeout: float, given: bytes | None = None, tests: bool = False
    ) -> Ended:
        """Run a command in ``/testbed``. ``tests``: with what tests need of a network."""
        ...


class InstanceBackend(Protocol):
    """Sets up and grades instances: with a container engine, or in sandboxes on this machine."""

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        ...

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
        """The repository at its base commit in ``directory`` (which must not exist), without later commits, and the
        mounts and variables of its interpreter.

        Raises ``InfrastructureError``.
        """
        ...

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """Apply ``patch`` and the row's tests to a fresh checkout and run them for at most ``timeout`` seconds.

        Never raises for what a patch does; an infrastructure failure is a verdict of kind ``INFRASTRUCTURE``.
        """
        ...


GOLD = "gold"
"""Instead of a file of predictions: the gold patch of every row."""

_REQUIRED = ("instance_id", "repo", "base_commit")
_TESTS = ("fail_to_pass", "pass_to_pass")
_TEXTS = [name for name in Instance.model_fields if name not in (*_TESTS, "extra")]


class PatchPrediction(Frozen):
    """A model's prediction for an instance; ``model_patch`` is ``None`` without a patch."""

    instance_id: str
    model_patch: str | None
    model_name_or_path: str = Field(default="None", pattern=r"^[^\x00]*[^.\x00][^\x00]*$")

    @property
    def folder(self) -> str:
        """The model's name as that of a folder."""
        return self.model_name_or_path.replace("/", "__")


def read_instances(file: Path) -> tuple[Instance, ...]:
    """The instances of a .json (list, or object by id), .jsonl or .parquet file, in its order.

    Raises ``ConfigError`` with one line for the first problem: a silently missing instance would change every metric.
    """
    instances: dict[str, Instance] = {}
    for at, row in _rows(file):
        try:
            instance = instance_of(row)
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from error
        if instance.instance_id in instances:
            raise ConfigError(f"{at}: {instance.instance_id} is there twice")
        instances[instance.instance_id] = instance
    if not instances:
        raise ConfigError(f"{file}: no instance in it")
    return tuple(instances.values())


def instance_of(row: Mapping[str, JsonValue]) -> Instance:
    """The instance of a row, whose columns of tests may be in lower case, as SWE-bench Pro's.

    Raises ``ConfigError`` that names missing or invalid columns; also for a row without tests.
    """
    if missing := [name for name in _REQUIRED if not isinstance(row.get(name), str) or not row[name]]:
        raise ConfigError(f"column {', '.join(missing)} is missing or empty; an instance has {', '.join(_REQUIRED)}")
    identity, repo, commit = (str(row[name]) for name in _REQUIRED)
    if "/" in identity or not is_contained(identity):
        raise ConfigError(f"the id {identity!r} cannot name a folder")
    if not is_contained(repo) or not re.fullmatch(r"\w[\w./-]*", commit):
        what = f"repo {repo!r:.100} or base_commit {commit!r:.100}"
        raise ConfigError(f"{identity}: {what} cannot be the name of a repository and a commit")
    tests = {name: _names(row.get(name.upper()) or row.get(name), name.upper()) for name in _TESTS}
    if not any(tests.values()):
        raise ConfigError("columns FAIL_TO_PASS and PASS_TO_PASS name no test, so that no patch of it can be judged")
    texts = {name: "" if row.get(name) is None else str(row[name]) for name in _TEXTS}
    extra: JsonObject = {name: each for name, each in row.items() if name not in texts and name.lower() not in tests}
    return Instance.model_validate({**texts, **tests, "extra": extra})


def read_rows(file: Path) -> list[JsonObject]:
    """The rows of a .json (list, object by id, or one row), .jsonl or .parquet file, in its order.

    Raises ``ConfigError`` for one that is no object.
    """
    return [row for _, row in _rows(file)]


def row_of(instance: Instance) -> JsonObject:
    """The row as SWE-bench publishes it: test names as JSON in a string, then the other columns."""
    plain = instance.model_dump(mode="json", exclude={"extra", *_TESTS})
    if not instance.environment_setup_commit:
        del plain["environment_setup_commit"]
    return {**plain, **{name.upper(): json.dumps(getattr(instance, name)) for name in _TESTS}, **instance.extra}


def read_predictions(source: str, instances: Iterable[Instance]) -> list[PatchPrediction]:
    """The predictions of these instances in a .jsonl or .json file (list, or object by id), or the gold patches for
    ``gold``. A later prediction of a model for an instance takes the place of an earlier one.

    Raises ``ConfigError`` for an invalid row, and where none is of these instances.
    """
    known = {instance.instance_id: instance for instance in instances}
    if source == GOLD:
        golds = {name: each.patch for name, each in known.items()}
        return [PatchPrediction(instance_id=name, model_patch=golds[name], model_name_or_path=GOLD) for name in golds]
    found: dict[tuple[str, str], PatchPrediction] = {}
    for at, row in _rows(Path(source)):
        named = {name: row[name] for name in PatchPrediction.model_fields if name in row}
        try:
            each = PatchPrediction.model_validate(named)
        except ValidationError as error:
            raise ConfigError(f"{at}: {describe(error)}") from error
        if each.instance_id in known:
            found[each.folder, each.instance_id] = each
    if not found:
        raise ConfigError(f"{source}: no prediction for these instances")
    return list(found.values())


def _names(value: Any, column: str) -> tuple[str, ...]:
    """Names of tests: a list, or its text in JSON or Python (SWE-bench Pro)."""
    for parse in (from_json, ast.literal_eval) if isinstance(value, str) else ():
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = parse(value)
            break
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(f"column {column} must be a list of test names, or its text in JSON or Python")
    return tuple(map(str, names))


def _rows(file: Path) -> Iterator[tuple[str, JsonObject]]:
    """The rows with their positions. Raises ``ConfigError``."""
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file; give a .jsonl, .json or .parquet file")
    for at, read in rows_of(file):
        try:
            row = read()
        except ExchangeError as error:
            raise ConfigError(f"{at}: {error}") from error
        by_id = row and all(isinstance(each, dict) for each in row.values())
        yield from ((at, each) for each in (row.values() if by_id else [row]))
