"""The suites repair-1 to repair-3: their back end, their rows, and further tasks."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.contrib.repair.bugs import LineEdit
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
from openhands_rl_plugin.core.files import is_contained, scratch_folder, write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.git import OTHER, git_command
from openhands_rl_plugin.environments.workspace.processes import Ended, run
from openhands_rl_plugin.environments.workspace.sandbox import (
    OF_A_PREFIX,
    SandboxLimits,
    check_bubblewrap,
    installed_parts,
    is_system,
    limited,
    prefix_mounts,
    sandboxed,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount
from openhands_rl_plugin.evals.runs.suites import EvalTask, OwnSuite, Suite, swe_task
from openhands_rl_plugin.evals.swe.grading import InstanceLogs, grade_and_log
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, TestsStatus, VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import patch_of
from openhands_rl_plugin.evals.tasks.source import commit_files, git_output

_CALLING = Path(__file__).with_name("calling.py")
_LIMITS = SandboxLimits(memory=4 * 1024**3)
INSIDE = "/tmp/testbed"
_LONGEST = 30.0
"""Seconds that all calls of one task may take, whatever the tests of other tasks may."""


class RepairBackend:
    """An ``InstanceBackend`` for repair tasks. Rows of other kinds are refused."""

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        await asyncio.to_thread(check_bubblewrap)

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
        """The repository with the bug, and this interpreter. Raises ``InfrastructureError``, ``ConfigError``."""
        write_repository(spec_of(instance), directory)
        commit = await asyncio.to_thread(commit_files, directory / ".git", directory, "start", who=REPAIR)
        if commit != instance.base_commit:
            raise InfrastructureError(
                f"{instance.instance_id}: its files give commit {commit[:12]}, not {instance.base_commit[:12]}; the row"
                " has been changed"
            )
        prefix = Path(sys.base_prefix).resolve()
        parts = [] if is_system(prefix.parts[1]) else installed_parts(prefix)
        # A compiled module counts as that of another text of the same size and second: edits may be that quick.
        return TaskWorkspace(
            root=directory.parent,
            repository=directory.name,
            mounts=tuple(WorkspaceMount(host=part, inside=str(part)) for part in parts),
            variables={"PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        )

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        return await grade_and_log(instance, patch, written, lambda: _graded(instance, patch, written, timeout))


async def _graded(instance: Instance, patch: str, logs: InstanceLogs, timeout: float) -> PatchVerdict:
    spec = spec_of(instance)
    verdict = PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.UNRESOLVED)
    with scratch_folder("repair") as folder:
        write_repository(spec, folder / "repository")
        (folder / "patch.diff").write_text(patch, encoding="utf-8")
        script = 'cd "$1/repository"; git apply --whitespace=nowarn ../patch.diff'
        try:
            await asyncio.to_thread(git_output, git_command(None, OTHER, script=script, other=folder), "git apply")
        except ConfigError as error:
            return verdict.model_copy(update={"kind": VerdictKind.UNAPPLIED, "reason": str(error)[:300]})
        ended = await _called(spec, folder / "repository", timeout)
    if ended.timed_out:
        late = f"the calls were not done after {ended.seconds:.0f} s"
        return verdict.model_copy(update={"kind": VerdictKind.TIMED_OUT, "reason": late, "test_seconds": ended.seconds})
    outcomes = _outcomes(spec, ended.text.strip().rpartition("\n")[2])
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
            "test_seconds": ended.seconds,
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


def write_repository(spec: RepairSpec, folder: Path) -> None:
    """Write the files. Raises ``ConfigError`` for a name that leaves the folder."""
    for path, text in repository_files(spec).items():
        if not is_contained(path):
            raise ConfigError(f"the file name {path!r} leaves the folder, or is one of git's own")
        write_file(folder / path, text, parents=True)


async def _called(spec: RepairSpec, repository: Path, timeout: float) -> Ended:
    """``calling.py`` in a sandbox without network; it prints the outcomes, which are compared outside."""
    prefix = sys.base_prefix
    item = {"path": spec.path, "name": spec.function, "calls": spec.model_dump(mode="json")["calls"]}
    mounts = [*prefix_mounts({prefix: OF_A_PREFIX}), "--bind", str(repository), INSIDE]
    mounts += ["--ro-bind", str(_CALLING), "/tmp/calling.py"]
    variables = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    program = limited(_LIMITS, ["python3", "/tmp/calling.py"])
    command = sandboxed(program, mounts, variables={**variables, "PYTHONHASHSEED": "0"}, folder=INSIDE)
    return await run(command, timeout=min(timeout, _LONGEST), given=json.dumps(item).encode(), limits=_LIMITS)


def _outcomes(spec: RepairSpec, printed: str) -> list[str | None]:
    """Parse the printed results; anything but a list of the right length counts as no results."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(printed)
        if isinstance(found, list) and len(found) == len(spec.calls):
            return [each if isinstance(each, str) and each.isprintable() else None for each in found]
    return [None for _ in spec.calls]


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
