"""The suites repair-1 to repair-3: their back end, their rows, and further tasks."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.contrib.repair.bugs import LineEdit
from openhands_rl_plugin.contrib.repair.calling import LONGEST
from openhands_rl_plugin.contrib.repair.oracle import fixed_text
from openhands_rl_plugin.contrib.repair.rows import (
    COLUMN,
    DIRECTORY,
    MORE,
    REPAIR,
    Level,
    RepairSpec,
    at_level,
    data_file,
    repair_instances,
    repository_files,
    spec_of,
)
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.files import read_left, scratch_folder
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.evals.runs.outcome import EvalTask
from openhands_rl_plugin.evals.runs.suites import OwnSuite, Suite, swe_task
from openhands_rl_plugin.evals.swe.backends.interpreters import with_own_interpreter
from openhands_rl_plugin.evals.swe.grading import grade_and_log
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict, TestsStatus, VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import patch_of
from openhands_rl_plugin.evals.tasks.sandbox import TreeSandbox
from openhands_rl_plugin.evals.tasks.trees import PLAIN, SourceTree, TreeFile, apply_patch, make_repository

_CALLING = Path(__file__).with_name("calling.py")
_MOST_FILES, _MOST_BYTES = 100, 2**20
_LONGEST = LONGEST + len("list:")


class RepairBackend:
    """An ``InstanceBackend`` for repair tasks. Rows of other kinds are refused."""

    name = "local"

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        await asyncio.to_thread(check_bubblewrap)

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """The repository with the bug, and this interpreter. Raises ``InfrastructureError``, ``ConfigError``."""
        commit = await asyncio.to_thread(make_repository, _files(spec_of(instance)), directory)
        if commit != instance.base_commit:
            raise InfrastructureError(
                f"{instance.instance_id}: its files give commit {commit[:12]}, not {instance.base_commit[:12]}; the row"
                " has been changed"
            )
        checkout = with_own_interpreter(directory)
        # A compiled module counts as that of another text of the same size and second: edits may be that quick.
        return checkout.model_copy(update={"variables": {**checkout.variables, "PYTHONDONTWRITEBYTECODE": "1"}})

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            return await asyncio.to_thread(_graded, instance, patch, written, timeout)

        return await grade_and_log(instance, patch, written, grade)

    async def close(self) -> None:
        """Does nothing."""


def _graded(instance: Instance, patch: str, logs: InstanceLogs, timeout: float) -> PatchVerdict:
    spec = spec_of(instance)
    verdict = PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.UNRESOLVED)
    with scratch_folder("repair") as folder:
        if why := apply_patch(_files(spec), patch, folder):
            return verdict.model_copy(update={"kind": VerdictKind.UNAPPLIED, "reason": why})
        tree = _python_files(folder / "repository", spec.path)
    started = time.monotonic()
    outcomes = _outcomes(spec, tree, timeout)
    seconds = time.monotonic() - started
    if outcomes is None:
        late = f"the calls were not done after {timeout:g} s, or the sandbox did not start"
        return verdict.model_copy(update={"kind": VerdictKind.TIMED_OUT, "reason": late, "test_seconds": seconds})
    good = [same(found, wanted) for found, wanted in zip(outcomes, spec.expected, strict=True)]
    lines = [
        f"{'PASSED' if each else 'FAILED'} {'' if at < spec.shown else 'hidden '}{called(spec, at)} gave {outcomes[at]}"
        for at, each in enumerate(good)
    ]
    logs.write("test_output.txt", "\n".join(lines) + "\n")
    passed = {name: good[at] for at, name in enumerate(_names(instance, spec))}
    first = next((called(spec, at) for at, each in enumerate(good) if not each), "")
    return verdict.model_copy(
        update={
            "kind": VerdictKind.RESOLVED if all(good) else VerdictKind.UNRESOLVED,
            "reason": f"{first} gives another value" if first else "",
            "fail_to_pass": _status(instance.fail_to_pass, passed),
            "pass_to_pass": _status((*instance.pass_to_pass, *list(passed)[spec.shown :]), passed),
            "test_seconds": seconds,
        }
    )


def plain(outcome: str | None) -> str | None:
    """An outcome without the mark of an iterator: a list of the same items is as good."""
    return None if outcome is None else outcome.removeprefix("list:")


def same(found: str | None, wanted: str | None) -> bool:
    """Whether two outcomes are equal values, as the shown tests compare them: dictionaries in any order."""
    if found is None or wanted is None or plain(found) == plain(wanted):
        return plain(found) == plain(wanted)
    try:
        return ast.literal_eval(plain(found) or "") == ast.literal_eval(plain(wanted) or "")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def called(spec: RepairSpec, at: int) -> str:
    """A call as it would be written."""
    positional, keywords = spec.calls[at]
    return f"{spec.function}({', '.join([*positional, *(f'{name}={text}' for name, text in keywords.items())])})"


def _names(instance: Instance, spec: RepairSpec) -> list[str]:
    """The names of the shown calls' tests, in their order, then those of the hidden ones."""
    file = instance.fail_to_pass[0].partition("::")[0]
    return [
        f"{file}::test_{at + 1}" if at < spec.shown else f"hidden_{at - spec.shown + 1}"
        for at in range(len(spec.calls))
    ]


def _status(names: tuple[str, ...], passed: dict[str, bool]) -> TestsStatus:
    return TestsStatus(
        success=tuple(name for name in names if passed.get(name)),
        failure=tuple(name for name in names if not passed.get(name)),
    )


def _files(spec: RepairSpec) -> SourceTree:
    return SourceTree({}).changed(repository_files(spec))


def _python_files(folder: Path, module: str) -> SourceTree:
    """The regular ``.py`` files, ``module`` first; no link that a patch may have made is followed."""
    found: dict[str, TreeFile] = {}
    for path in _paths(folder, module):
        with contextlib.suppress(OSError):  # too large, a link, or a path through a file
            if len(found) < _MOST_FILES and not (folder / path).is_symlink():
                found[path] = TreeFile(PLAIN, read_left(folder, path, _MOST_BYTES))
    return SourceTree(found)


def _paths(folder: Path, module: str) -> Iterator[str]:
    yield module
    for parent, _, names in os.walk(folder):
        paths = (Path(parent, name).relative_to(folder).as_posix() for name in sorted(names) if name.endswith(".py"))
        yield from (path for path in paths if path != module)


def _outcomes(spec: RepairSpec, tree: SourceTree, timeout: float) -> list[str | None] | None:
    calls = [[list(positional), dict(keywords)] for positional, keywords in spec.calls]
    data = tree.files[spec.path].data if spec.path in tree.files else b""
    text = data.decode("utf-8", "surrogateescape")
    item = {"path": spec.path, "name": spec.function, "text": text, "calls": calls, "kinds": True}
    result = TreeSandbox(Path(sys.base_prefix), (), timeout).run_program(tree, _CALLING, [item], isolated=True)
    if not isinstance(result, list) or len(result) != 1:
        return None
    found = result[0]
    if not isinstance(found, list) or len(found) != len(calls):
        return [None for _ in calls]
    return [each if isinstance(each, str) and len(each) <= _LONGEST and _is_text(each) else None for each in found]


def _is_text(value: str) -> bool:
    """Whether it can be logged: JSON may hold halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


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


class RepairSuite(OwnSuite):
    """The repair tasks at one level."""

    further = MORE
    rows = data_file("repair.jsonl")
    column = COLUMN
    directory = DIRECTORY

    def __init__(self, level: Level) -> None:
        name = f"{REPAIR}-{level}"
        self.level: Level = level
        self.suite = Suite(name=name, dataset=name, split="heldout")

    def tasks(self, split: str) -> tuple[EvalTask, ...]:
        """As in ``OwnSuite``."""
        instances = more_instances(self.level) if split == MORE else repair_instances(self.level, split)
        suite = self.suite.model_copy(update={"split": split})
        return tuple(swe_task(instance, suite) for instance in instances)

    def backend(self) -> RepairBackend:
        """As in ``OwnSuite``."""
        return RepairBackend()


LEVEL_1, LEVEL_2, LEVEL_3 = RepairSuite(1), RepairSuite(2), RepairSuite(3)
