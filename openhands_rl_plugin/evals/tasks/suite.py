"""Makes a file of tasks: bugs that tests notice, and past fixes, with a journal to resume from."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice, zip_longest
from operator import itemgetter
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.files import scratch_folder
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.bugs import Bug, PythonSource, bugs_of
from openhands_rl_plugin.evals.tasks.gate import TaskLineage, Validation, write_tasks
from openhands_rl_plugin.evals.tasks.packages import Package, TaskPlan, git_origin, is_test, open_git
from openhands_rl_plugin.evals.tasks.sandbox import (
    PreparedPackage,
    TestRun,
    prepare_package,
    prepare_tree,
    without_tests,
)
from openhands_rl_plugin.evals.tasks.trees import GitRepository, SourceTree

REOPENED = "reopen_fix"
"""What the lineage names in place of a kind of bug where a past fix is taken back."""

LARGEST_SHARE = 0.6
"""The fraction of tests that may fail with the bug; ``TaskPlan.least_share`` is the least."""
TRIES_PER_TASK = 12
LEAK_LENGTH = 12
_MOST_SHOWN, _MOST_NAMED = 2, 6
_UNSTABLE = re.compile(r"0x[0-9a-f]{6,}|\d+\.\d{9,}s")
_LOOKED_THROUGH, _MOST_FILES, _TRIES_PER_FIX = 400, 6, 4


class TriedBug(Frozen):
    """The result of one change: a task, or the reason for rejecting it."""

    reason: str = ""
    instance: Instance | None = None
    lineage: TaskLineage | None = None


type OnTried = Callable[[Package, int, str], None]
"""The package, its tasks so far, and why the last change is no task (empty when it is one)."""


class _Journal:
    """The changes tried so far, a line each, for a run that is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, TriedBug] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            name, _, result = line.partition("\t")
            with suppress(ValidationError):  # the line that was being written when the run was killed
                self.known[name] = TriedBug.model_validate_json(result)

    def add(self, name: str, result: TriedBug) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{name}\t{result.model_dump_json()}\n")


def make_suite(plan: TaskPlan, out: Path, cache: Path, on_tried: OnTried) -> tuple[int, list[str]]:
    """Make the tasks of a plan and write them to ``out``, with their lineage beside it.

    Returns their number, and a line for each package that gave fewer than wanted. After a kill the same call tries
    nothing again: a journal beside ``out`` has what was tried.

    Raises ``ConfigError`` without bubblewrap, and when no package gave a task.
    """
    find_bubblewrap()
    journal = _Journal(out.with_name(f".{out.name}.journal"))
    made: list[TriedBug] = []
    problems: list[str] = []
    for package in plan.packages:
        try:
            mine = _tasks_of(plan, package, cache, journal, on_tried)
        except RLError as error:
            problems.append(str(error))
            continue
        if len(mine) < plan.per_package:
            problems.append(f"{package.label}: {len(mine)} of {plan.per_package} tasks, no more bugs are good")
        made += mine
    if not made:
        raise ConfigError("\n".join(problems) or "no task was made")
    write_tasks(out, [each.instance for each in made if each.instance], [each.lineage for each in made if each.lineage])
    journal.path.unlink(missing_ok=True)
    return len(made), problems


def _tasks_of(plan: TaskPlan, package: Package, cache: Path, journal: _Journal, on_tried: OnTried) -> list[TriedBug]:
    """Up to half of the tasks of a package from its newest fixes, the others from bugs that are put into it.

    They depend on the package, the plan and its seed alone.
    """
    made: list[TriedBug] = []
    scope = hashlib.sha256(plan.model_copy(update={"packages": (package,)}).model_dump_json().encode()).hexdigest()

    def attempt(key: str, change: Callable[[], TriedBug]) -> bool:
        result = journal.known.get(f"{scope}:{key}")
        if result is None:
            result = change()
            tests = result.instance.fail_to_pass if result.instance else None
            if tests and any(each.instance and each.instance.fail_to_pass == tests for each in made):
                result = TriedBug(reason="another task fails the same tests")
            journal.add(f"{scope}:{key}", result)
            on_tried(package, len(made) + (result.instance is not None), result.reason)
        made.extend([result] if result.instance else [])
        return result.instance is not None

    if package.git and (fixes := plan.per_package // 2):
        repository = open_git(package, cache)
        for commit in islice(_fixes(repository, package.commit), fixes * _TRIES_PER_FIX):
            if len(made) < fixes:
                attempt(commit[:12], partial(_reopened, repository, package, plan, commit, cache))
    if left := plan.per_package - len(made):
        prepared = prepare_package(package, plan, cache)
        used: set[tuple[str, str]] = set()
        for bug in candidates(prepared)[: left * TRIES_PER_TASK]:
            if len(made) == plan.per_package:
                break
            place, key = (bug.path, bug.function), key_of(bug)
            if place not in used and attempt(key, partial(try_bug, prepared, key, bug)):
                used.add(place)
    return made


def key_of(bug: Bug) -> str:
    """A key for a bug: equal edits of the same file have equal keys."""
    return hashlib.sha256(repr((bug.path, bug.function, bug.edits)).encode()).hexdigest()[:12]


def buggy(tree: SourceTree, bug: Bug) -> SourceTree:
    """The tree with the bug."""
    return tree.changed({bug.path: PythonSource(tree.text(bug.path) or "").apply(bug.edits)})


def try_bug(prepared: PreparedPackage, key: str, bug: Bug) -> TriedBug:
    """Insert a bug into the package and try to make a task of it."""
    return try_change(prepared, key, bug, buggy(prepared.tree, bug))


def candidates(prepared: PreparedPackage) -> list[Bug]:
    """The bugs that tests may detect, in an order that depends on the seed only: kinds and functions alternate.

    Bugs in lines that fewer tests execute than have to fail are left out; without coverage every line counts.
    """
    plan, covered = prepared.plan, prepared.first_run.covered
    least = max(1.0, plan.least_share * len(prepared.tests))
    order = random.Random(f"{plan.seed}:{prepared.package.name}:{prepared.origin.pin}")
    by_kind: dict[str, list[Bug]] = {}
    for path in prepared.layout.code:
        lines = covered.get(path, {})
        for bug in bugs_of(path, prepared.tree.text(path) or ""):
            if not covered or lines.get(bug.line, 0) >= least:
                by_kind.setdefault(bug.kind, []).append(bug)
    groups = [by_kind[kind] for kind in sorted(by_kind)]
    for bugs in groups:
        order.shuffle(bugs)
    order.shuffle(groups)
    earlier: Counter[tuple[str, str]] = Counter()
    turns: list[tuple[int, Bug]] = []
    for bug in filter(None, chain.from_iterable(zip_longest(*groups))):
        turns.append((earlier[bug.path, bug.function], bug))
        earlier[bug.path, bug.function] += 1
    return [bug for _, bug in sorted(turns, key=itemgetter(0))]


def _fixes(repository: GitRepository, head: str) -> Iterator[str]:
    """Commits, newest first, that change Python code and Python tests, and few other files."""
    log = repository.text(
        *("log", "--first-parent", "--no-merges", f"--max-count={_LOOKED_THROUGH}", "--format=%x00%H %P"),
        *("--name-status", "--no-renames", head),
    )
    for entry in log.split("\0")[1:]:
        first, _, rest = entry.partition("\n")
        files = [line.split("\t") for line in rest.splitlines() if "\t" in line]
        python = [path for status, path in files if path.endswith(".py") and status == "M"]
        tests = [path for path in python if is_test(path)]
        if len(first.split()) == 2 and tests and len(python) > len(tests) and len(python) <= _MOST_FILES:
            yield first.split()[0]


def _reopened(repository: GitRepository, package: Package, plan: TaskPlan, commit: str, cache: Path) -> TriedBug:
    """The task of one fix: the code before it, with the tests after it."""
    fixed, before = repository.tree(commit), repository.tree(f"{commit}^")
    code = {
        path: before.text(path)
        for path, file in sorted(fixed.files.items())
        if path.endswith(".py") and not is_test(path) and before.files.get(path, file) != file
    }
    try:
        prepared = prepare_tree(package, plan, git_origin(package, commit), fixed, cache)
    except ConfigError as error:
        return TriedBug(reason=str(error))
    bug = Bug(next(iter(code), ""), REOPENED, "", 0, ())
    return try_change(prepared, commit[:12], bug, fixed.changed(code))


def try_change(prepared: PreparedPackage, key: str, bug: Bug, tree: SourceTree) -> TriedBug:
    """Run the tests twice on ``tree``, which has the bug, and make a task if the bug is suitable."""
    first = prepared.sandbox.run_tests(tree, prepared.arguments)
    if (reason := _refusal(prepared, first)) is not None:
        return TriedBug(reason=reason)
    second = prepared.sandbox.run_tests(tree, prepared.arguments, hash_seed=1)
    failing = prepared.tests - first.passed
    if second.timed_out or failing != prepared.tests - second.passed:
        return TriedBug(reason="two runs with the bug differ")
    statement = _statement(prepared, first, failing)
    if statement is None:
        return TriedBug(reason="no output of what fails can be shown")
    if statement != _statement(prepared, second, failing):
        return TriedBug(reason="two runs print different output")
    instance = _instance(prepared, tree, key, failing, statement)
    if leaks(statement, instance.patch):
        return TriedBug(reason="the output shows a line of the fix")
    lineage = TaskLineage(
        instance_id=instance.instance_id,
        source=prepared.origin.source,
        modifier=bug.kind,
        seed=prepared.plan.seed if bug.edits else None,
        path=bug.path,
        function=bug.function,
        validation=Validation(runs_without_bug=2, runs_with_bug=2, tests=len(prepared.tests), failing=len(failing)),
    )
    return TriedBug(instance=instance, lineage=lineage)


def _refusal(prepared: PreparedPackage, run: TestRun) -> str | None:
    if run.timed_out:
        return "the tests take too long with it"
    if run.crashed or run.broken or not prepared.tests <= run.outcomes.keys():
        return "tests disappear with it"
    failing = prepared.tests - run.passed
    if not failing:
        return "no test notices it"
    if not prepared.plan.least_share <= len(failing) / len(prepared.tests) <= LARGEST_SHARE:
        return f"{len(failing)} of {len(prepared.tests)} tests fail"
    return None


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
    label, origin = prepared.package.label, prepared.origin
    with scratch_folder("tasks") as folder:
        repository = GitRepository.create(Path(folder) / "task.git")
        base_commit = repository.commit(base, label, "base")
        with_tests = repository.commit(tree, label, "tests")
        solved = repository.commit(prepared.tree, label, "solved")
        patch, test_patch = repository.diff(with_tests, solved), repository.diff(base_commit, with_tests)
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
        extra={
            "source": {**origin.source, "label": label},
            "python": prepared.plan.python,
            "packages": list(prepared.requirements),
            "install": list(prepared.install),
            "test_command": prepared.test_command,
            "test_files": [],
            "log_parser": "pytest",
        },
    )
