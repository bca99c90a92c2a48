"""Makes a file of tasks: bugs that tests notice and past fixes of many packages, with a journal to resume from."""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.files import scratch_folder
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.bugs import FUNCTIONS, Bug, Edit, Function, PythonSource, bugs_of, definitions
from openhands_rl_plugin.evals.tasks.gate import TaskLineage, Validation, write_tasks
from openhands_rl_plugin.evals.tasks.packages import Package, SourceOrigin, TaskPlan, is_test, open_git
from openhands_rl_plugin.evals.tasks.sandbox import (
    FailureNote,
    PreparedPackage,
    TestRun,
    prepare_package,
    prepare_tree,
    without_tests,
)
from openhands_rl_plugin.evals.tasks.trees import GitRepository, SourceTree

REOPENED = "reopen_fix"
"""The name of the modifier that restores a function of an older version."""


def key_of(bug: Bug) -> str:
    """A key for a bug: equal edits of the same file have equal keys."""
    return hashlib.sha256(bug.model_dump_json(exclude={"modifier"}).encode()).hexdigest()[:12]


def buggy(tree: SourceTree, bug: Bug) -> SourceTree:
    """The tree with the bug. Raises ``ValueError`` when the bug was made for another text of the file."""
    text = tree.text(bug.path)
    if text is None:
        raise ValueError(f"{bug.path} is no text")
    return tree.changed({bug.path: PythonSource(text).apply(bug.edits)})


def candidates(
    tree: SourceTree,
    code: Iterable[str],
    covered: Mapping[str, Mapping[int, int]],
    least: float,
    older: SourceTree | None,
    seed: str,
) -> list[Bug]:
    """The bugs that tests may detect, in an order that depends on ``seed`` only: modifiers and functions alternate.

    Functions of an older version come first. Bugs in lines that fewer than ``least`` tests execute are left out;
    without coverage every line counts.
    """
    order = random.Random(seed)
    reopened: list[Bug] = []
    by_modifier: dict[str, list[Bug]] = {}
    for path in code:
        text = tree.text(path)
        if text is None:
            continue
        lines = covered.get(path, {})
        reopened += _reopened(path, text, older.text(path) if older is not None else None)
        for bug in bugs_of(path, text):
            if not covered or lines.get(bug.line, 0) >= max(1, least):
                by_modifier.setdefault(bug.modifier, []).append(bug)
    for bugs in (reopened, *(by_modifier[name] for name in sorted(by_modifier))):
        order.shuffle(bugs)
    names = sorted(by_modifier)
    order.shuffle(names)
    return [*reopened, *_in_turns([by_modifier[name] for name in names])]


def _in_turns(groups: Sequence[list[Bug]]) -> Iterator[Bug]:
    """Round-robin over groups; within a group, functions without an attempt come first."""
    tried: set[tuple[str, str]] = set()
    left = [list(group) for group in groups]
    while any(left):
        for group in left:
            if group:
                at = next((index for index, bug in enumerate(group) if (bug.path, bug.function) not in tried), 0)
                bug = group.pop(at)
                tried.add((bug.path, bug.function))
                yield bug


def _meaning(node: Function) -> list[str]:
    """The syntax of a function's body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return [ast.dump(statement) for statement in body]


def _reopened(path: str, text: str, old_text: str | None) -> list[Bug]:
    """The functions with another body in an older version, each restored to that."""
    if old_text is None or old_text == text:
        return []
    try:
        new, old = PythonSource(text), PythonSource(old_text)
    except SyntaxError:
        return []
    before = {name: node for name, node in definitions(old.tree) if isinstance(node, FUNCTIONS)}
    found: list[Bug] = []
    for name, node in definitions(new.tree):
        past = before.get(name)
        if past is None or not isinstance(node, FUNCTIONS) or not (new.stands_alone(node) and old.stands_alone(past)):
            continue
        if past.col_offset != node.col_offset or any("." in name and name.startswith(f"{b.function}.") for b in found):
            continue
        start, end = new.lines(node)
        was = old.between(*old.lines(past))
        if _meaning(past) != _meaning(node):
            edits = (Edit(start=start, end=end, text=was),)
            found.append(Bug(path=path, modifier=REOPENED, function=name, line=node.body[-1].lineno, edits=edits))
    return found


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
    with scratch_folder("tasks") as folder:
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


_LOOKED_THROUGH = 400
_MOST_FILES = 6
_TRIES_PER_TASK = 4


def fixes_of(
    package: Package, plan: TaskPlan, cache: Path, *, known: Mapping[str, TriedBug], tried: Callable[[TriedBug], None]
) -> tuple[list[Instance], list[TaskLineage]]:
    """Up to half of ``per_package`` tasks from the newest fixes; none without a git repository."""
    if package.git is None:
        return [], []
    repository, wanted = open_git(package, cache), plan.per_package // 2
    instances: list[Instance] = []
    lineage: list[TaskLineage] = []
    for at, commit in enumerate(_fixes(repository, package.commit)):
        if len(instances) == wanted or at == wanted * _TRIES_PER_TASK:
            break
        result = known.get(commit[:12])
        if result is None:
            result = _opened_again(repository, package, plan, commit, cache)
            tried(result)
        if result.instance is not None and result.lineage is not None:
            instances.append(result.instance)
            lineage.append(result.lineage)
    return instances, lineage


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


def _opened_again(repository: GitRepository, package: Package, plan: TaskPlan, commit: str, cache: Path) -> TriedBug:
    """The task of one fix: the code before it, with the tests after it."""
    fixed, before = repository.tree(commit), repository.tree(f"{commit}^")
    code = {
        path: before.text(path)
        for path in sorted(fixed.files)
        if path.endswith(".py")
        and not is_test(path)
        and path in before.files
        and fixed.files[path] != before.files[path]
    }
    origin = SourceOrigin(kind="git", name=package.name, version=commit[:8], pin=commit, place=package.git or "")
    try:
        prepared = prepare_tree(package, plan, origin, fixed, None, cache)
    except ConfigError as error:
        return TriedBug(key=commit[:12], reason=str(error))
    path = next(iter(code), "")
    return try_change(prepared, Change(key=commit[:12], path=path), fixed.changed(code))


class Progress(Protocol):
    """Callbacks for the progress of a run."""

    def package(self, label: str, at: int, of: int) -> None:
        """A package begins."""
        ...

    def tried(self, made: int, wanted: int, reason: str) -> None:
        """A bug was tried; ``reason``: why it is no task; empty when it is one."""
        ...


class SuiteSummary(Frozen):
    """The result of a run, and one line for each package with fewer tasks than requested."""

    tasks: int
    packages: int
    problems: tuple[str, ...] = ()


class _Finished(Frozen):
    """The line of the journal that ends a package."""

    package: str
    instances: tuple[Instance, ...]
    lineage: tuple[TaskLineage, ...]


class _Journal:
    """The bugs tried so far, one on each line. A journal of another plan is refused."""

    def __init__(self, path: Path, plan: TaskPlan) -> None:
        self._path = path
        self._head = hashlib.sha256(plan.model_dump_json(exclude={"packages"}).encode()).hexdigest()
        self.tried: dict[str, dict[str, TriedBug]] = {}
        self.finished: dict[str, _Finished] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and lines[0] != self._head:
            raise ConfigError(f"{path} is the journal of a run with other settings: finish that, or delete the file")
        self._read(lines[1:])

    def _read(self, lines: Sequence[str]) -> None:
        for line in lines:
            name, _, entry = line.partition("\t")
            try:
                if name == "finished":
                    done = _Finished.model_validate_json(entry)
                    self.finished[done.package] = done
                else:
                    result = TriedBug.model_validate_json(entry)
                    self.tried.setdefault(name, {})[result.key] = result
            except ValidationError:
                continue  # the line that was being written when the run was killed

    def add(self, name: str, entry: TriedBug | _Finished) -> None:
        """Append a line; complete lines survive a kill."""
        new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{self._head}\n" if new else "")
            file.write(f"{name}\t{entry.model_dump_json()}\n")

    def remove(self) -> None:
        """Delete the journal of a finished run."""
        self._path.unlink(missing_ok=True)


def make_suite(plan: TaskPlan, out: Path, cache: Path, progress: Progress) -> SuiteSummary:
    """Make the tasks of a plan and write them to ``out``, with their lineage beside it.

    Unusable packages are in ``problems``. Raises ``ConfigError`` without bubblewrap, for a journal of
    other settings, and when no package gave a task.
    """
    find_bubblewrap()
    journal = _Journal(out.with_name(f".{out.name}.journal"), plan)
    instances: list[Instance] = []
    lineage: list[TaskLineage] = []
    problems: list[str] = []
    for at, package in enumerate(plan.packages):
        progress.package(package.label, at, len(plan.packages))
        key = hashlib.sha256(package.model_dump_json().encode()).hexdigest()[:16]
        done = journal.finished.get(key)
        if done is None:
            try:
                done = _finished(plan, package, key, journal, cache, progress.tried)
            except RLError as error:
                problems.append(str(error))
                continue
        if len(done.instances) < plan.per_package:
            problems.append(
                f"{package.label}: {len(done.instances)} of {plan.per_package} tasks, no more bugs are good"
            )
        instances += done.instances
        lineage += done.lineage
    if not instances:
        raise ConfigError("\n".join(problems) or "no task was made")
    write_tasks(out, instances, lineage)
    journal.remove()
    return SuiteSummary(tasks=len(instances), packages=len({each.repo for each in instances}), problems=tuple(problems))


def _finished(
    plan: TaskPlan,
    package: Package,
    key: str,
    journal: _Journal,
    cache: Path,
    on_progress: Callable[[int, int, str], None],
) -> _Finished:
    known = journal.tried.get(key, {})
    made = sum(each.instance is not None for each in known.values())

    def tried(result: TriedBug) -> None:
        nonlocal made
        made += result.instance is not None
        journal.add(key, result)
        on_progress(made, plan.per_package, result.reason)

    instances, lineage = fixes_of(package, plan, cache, known=known, tried=tried)
    left = plan.per_package - len(instances)
    if left > 0:
        prepared = prepare_package(package, plan, cache)
        more, their_lineage = make_tasks(prepared, left, known=known, tried=tried)
        instances, lineage = [*instances, *more], [*lineage, *their_lineage]
    done = _Finished(package=key, instances=tuple(instances), lineage=tuple(lineage))
    journal.add("finished", done)
    return done
