"""Makes tasks of one package: inserts bugs one after the other and keeps those that make a valid task."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.bugs.table import Bug
from openhands_rl_plugin.evals.tasks.candidates import REOPENED, buggy, candidates, key_of
from openhands_rl_plugin.evals.tasks.hidden_tests import without_tests
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage, Validation
from openhands_rl_plugin.evals.tasks.sandbox import FailureNote, TestRun
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.prepared_package import PreparedPackage
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree

LARGEST_SHARE = 0.6
"""The fraction of tests that may fail with the bug; ``TaskPlan.least_share`` is the least."""
TRIES_PER_TASK = 12
LEAK_LENGTH = 12
_MOST_SHOWN, _MOST_NAMED = 2, 6
_UNSTABLE = re.compile(r"0x[0-9a-f]{6,}|\d+\.\d{9,}s")
_NEVER_IN_A_FIX = {"NameError", "ImportError", "ModuleNotFoundError", "UnboundLocalError"}
_OTHER_CODE = re.compile(
    r"AttributeError: .*has no attribute '_|TypeError: .*(unexpected keyword|positional) argument", re.DOTALL
)


class TriedBug(Frozen):
    """The result of one bug: a task, or the reason for rejecting it."""

    key: str
    reason: str = ""
    instance: Instance | None = None
    lineage: TaskLineage | None = None


class Change(Frozen):
    """A change of the code, for the lineage. ``seed`` is ``None`` without randomness."""

    key: str
    path: str
    modifier: str = REOPENED
    function: str = ""
    seed: int | None = None


def make_tasks(
    prepared: PreparedPackage, wanted: int, *, known: Mapping[str, TriedBug], tried: Callable[[TriedBug], None]
) -> tuple[list[Instance], list[TaskLineage]]:
    """Make up to ``wanted`` tasks. ``tried`` is called for every new attempt, ``known`` has earlier ones.

    The result depends on the package, the plan and its seed alone.
    """
    plan = prepared.plan
    bugs = candidates(
        prepared.tree,
        prepared.layout.code,
        prepared.first_run.covered,
        prepared.plan.least_share * len(prepared.tests),
        prepared.older,
        f"{plan.seed}:{prepared.package.name}:{prepared.origin.pin}",
    )
    made: list[TriedBug] = []
    used: set[tuple[str, str]] = set()
    failing: set[tuple[str, ...]] = set()
    reopened = 0
    for bug in bugs[: wanted * TRIES_PER_TASK]:
        place = (bug.path, bug.function)
        if place in used or (bug.modifier == REOPENED and reopened >= max(1, wanted // 2)):
            continue
        result = known.get(key_of(bug))
        if result is None:
            result = try_bug(prepared, bug)
            if result.instance is not None and result.instance.fail_to_pass in failing:
                result = TriedBug(key=result.key, reason="another task fails the same tests")
            tried(result)
        if result.instance is None or result.lineage is None:
            continue
        made.append(result)
        used.add(place)
        failing.add(result.instance.fail_to_pass)
        reopened += bug.modifier == REOPENED
        if len(made) == wanted:
            break
    return [each.instance for each in made if each.instance], [each.lineage for each in made if each.lineage]


def try_bug(prepared: PreparedPackage, bug: Bug) -> TriedBug:
    """Insert a bug into the package and try to make a task of it."""
    change = Change(
        key=key_of(bug), path=bug.path, modifier=bug.modifier, function=bug.function, seed=prepared.plan.seed
    )
    return try_change(prepared, change, buggy(prepared.tree, bug))


def try_change(prepared: PreparedPackage, change: Change, tree: SourceTree) -> TriedBug:
    """Run the tests twice on ``tree``, which has the bug, and make a task if the bug is suitable."""
    first = prepared.sandbox.run_tests(tree, prepared.arguments)
    if (reason := _refusal(prepared, change.modifier, first)) is not None:
        return TriedBug(key=change.key, reason=reason)
    second = prepared.sandbox.run_tests(tree, prepared.arguments, hash_seed=1)
    failing = prepared.tests - first.passed
    if second.timed_out or failing != prepared.tests - second.passed:
        return TriedBug(key=change.key, reason="two runs with the bug differ")

    statement = _statement(prepared, first, failing)
    if statement is None:
        return TriedBug(key=change.key, reason="no output of what fails can be shown")
    if statement != _statement(prepared, second, failing):
        return TriedBug(key=change.key, reason="two runs print different output")
    instance = _instance(prepared, tree, change.key, failing, statement)
    if leaks(statement, instance.patch):
        return TriedBug(key=change.key, reason="the output shows a line of the fix")
    lineage = TaskLineage(
        instance_id=instance.instance_id,
        source=prepared.origin.as_json(),
        modifier=change.modifier,
        seed=change.seed,
        path=change.path,
        function=change.function,
        validation=Validation(runs_without_bug=2, runs_with_bug=2, tests=len(prepared.tests), failing=len(failing)),
    )
    return TriedBug(key=change.key, instance=instance, lineage=lineage)


def _refusal(prepared: PreparedPackage, modifier: str, run: TestRun) -> str | None:
    if run.timed_out:
        return "the tests take too long with it"
    if run.crashed or run.broken or not prepared.tests <= run.outcomes.keys():
        return "tests disappear with it"
    failing = prepared.tests - run.passed
    if not failing:
        return "no test notices it"
    if not prepared.plan.least_share <= len(failing) / len(prepared.tests) <= LARGEST_SHARE:
        return f"{len(failing)} of {len(prepared.tests)} tests fail"
    if modifier == REOPENED and any(_is_of_other_code(run.failures[test]) for test in failing if test in run.failures):
        return "the older code needs what is not there any more"
    return None


def _is_of_other_code(note: FailureNote) -> bool:
    """Whether a failure shows that code of two versions does not fit together, which is not what a fix was about."""
    return note.error in _NEVER_IN_A_FIX or _OTHER_CODE.search(f"{note.error}: {note.message}") is not None


def _statement(prepared: PreparedPackage, run: TestRun, failing: Iterable[str]) -> str | None:
    """The output of the failing tests that say it shortest; ``None`` where it differs from run to run."""
    failures = {test: run.failures[test].output for test in sorted(failing) if test in run.failures}
    found = sorted((len(text), test) for test, text in failures.items() if text and not _UNSTABLE.search(text))
    if not found:
        return None
    shown = [test for _, test in found[:_MOST_SHOWN]]
    others = [test for test in failures if test not in shown]
    parts = [f"Tests of {prepared.package.label} fail with Python {prepared.plan.python}."]
    parts += [f"`{test}`:\n\n```\n{failures[test]}\n```" for test in shown]
    if others:
        more = ["- ..."] if len(others) > _MOST_NAMED else []
        parts.append("\n".join(["These fail, too:\n", *(f"- `{test}`" for test in others[:_MOST_NAMED]), *more]))
    return "\n\n".join(parts) + "\n"


def leaks(statement: str, patch: str) -> bool:
    """Whether a changed line of a patch that is longer than ``LEAK_LENGTH`` characters stands in a statement."""
    return any(line in statement for line in changed_lines(patch) if len(line) > LEAK_LENGTH)


def changed_lines(patch: str) -> list[str]:
    """The added and removed lines of a patch, without what is around them."""
    return [
        line[1:].strip() for line in patch.splitlines() if line[:1] in "+-" and not line.startswith(("+++ ", "--- "))
    ]


def _instance(
    prepared: PreparedPackage, tree: SourceTree, key: str, failing: frozenset[str], statement: str
) -> Instance:
    base = tree.changed(without_tests(prepared.tree, sorted(failing)))
    with tempfile.TemporaryDirectory(prefix="openhands-rl-tasks-") as folder:
        repository = GitRepository.create(Path(folder) / "task.git")
        message = prepared.package.label
        base_commit = repository.commit(base, message, "base")
        with_tests = repository.commit(tree, message, "tests")
        solved = repository.commit(prepared.tree, message, "solved")
        patch, test_patch = repository.diff(with_tests, solved), repository.diff(base_commit, with_tests)
    origin = prepared.origin
    return Instance(
        instance_id=f"{origin.kind}__{prepared.package.name}-{origin.version}-{key[:8]}",
        repo=f"{origin.kind}/{prepared.package.name}",
        base_commit=base_commit,
        version=origin.version,
        problem_statement=statement,
        patch=patch,
        test_patch=test_patch,
        fail_to_pass=tuple(sorted(failing)),
        pass_to_pass=tuple(sorted(prepared.tests - failing)),
        extra=_columns(prepared),
    )


def _columns(prepared: PreparedPackage) -> JsonObject:
    split: Sequence[tuple[str, str]] = [("split", prepared.package.split)] if prepared.package.split else []
    return {
        **dict(split),
        "source": {**prepared.origin.as_json(), "label": prepared.package.label},
        "python": prepared.plan.python,
        "packages": list(prepared.requirements),
        "install": list(prepared.install),
        "test_command": prepared.test_command,
        "test_files": [],
        "log_parser": "pytest",
    }
