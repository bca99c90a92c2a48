"""Makes repair tasks of the functions of a user's repository."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import keyword
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from openhands_rl_plugin.contrib.repair.bugs import (
    Call,
    PackageSlicer,
    SlicedFunction,
    bugs_in,
    patch_of,
    varied,
)
from openhands_rl_plugin.contrib.repair.rows import COLUMN, RepairSpec, repository_files, spec_of, statement
from openhands_rl_plugin.contrib.repair.suites import plain, same
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import file_sha256, write_file
from openhands_rl_plugin.core.messages import counted
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.gate import (
    Check,
    TaskLineage,
    Validation,
    read_lineage,
    write_tasks,
)
from openhands_rl_plugin.evals.tasks.packages import (
    OwnRepository,
    Package,
    TaskPlan,
    fetch,
    is_test,
    layout_of,
    make_environment,
)
from openhands_rl_plugin.evals.tasks.sandbox import TreeSandbox
from openhands_rl_plugin.evals.tasks.split import LEAST_HELD_OUT, LEAST_TRAINING, TRAIN, SplitTask, split_tasks
from openhands_rl_plugin.evals.tasks.trees import SourceTree, commit_of

RUNS = 3
"""Runs with different hash seeds, which must agree."""
SHOWN_FAILING, SHOWN_PASSING, HIDDEN = 2, 3, 8
LEAST_CALLS = 4
_MOST_BUGS = 10
_RECORDING_SECONDS = 240
_HERE = Path(__file__).parent
_NOWHERE = SourceTree({})


class RepairPlan(TaskPlan):
    """``per_package`` bounds the tasks of a package, ``per_function`` those of a function."""

    per_function: int = 2


class CheckedFunction(Frozen):
    """A function with calls whose outcomes did not differ between runs. ``expected``: those outcomes, as literals."""

    sliced: SlicedFunction
    calls: tuple[tuple[tuple[str, ...], dict[str, str]], ...]
    expected: tuple[str, ...]


class _Bug(Frozen):
    kind: str
    text: str
    outcomes: tuple[str | None, ...]


class Recorded(Frozen):
    """What a package's tests and doctests call: ``path:function`` -> calls. ``broken``: files of tests that could not
    be imported -> why; ``late``: time was up before all had run, or nothing came of it.
    """

    calls: dict[str, list[Call]] = Field(default_factory=dict)
    broken: dict[str, str] = Field(default_factory=dict)
    late: bool = False


def checked_functions(package: Package, plan: RepairPlan, cache: Path) -> tuple[list[CheckedFunction], Recorded]:
    """The functions of a package that its tests and doctests call with literals, and that give the same each time.

    Raises ``ConfigError`` for an unknown package, ``InfrastructureError`` where what its tests need cannot be
    installed.
    """
    origin, tree = fetch(package, cache)
    layout = layout_of(tree)
    paths = package.paths or layout.paths
    code = {_below(path, paths): path for path in layout.code if not is_test(path)}
    modules = {short: _module(short) for short in code}
    given: JsonObject = {
        "modules": [*modules.values()],
        "tests": list(package.tests or layout.arguments),
        "seconds": _RECORDING_SECONDS,
    }
    requirements = list(dict.fromkeys([*plan.requirements, *package.requirements]))
    how = hashlib.sha256(json.dumps([given, requirements]).encode()).hexdigest()[:8]
    kept = cache / "recorded-calls" / f"{package.name}-{origin.version}-{origin.pin[:12]}-{how}.json"
    if kept.exists():
        recorded = Recorded.model_validate_json(kept.read_bytes())
    else:
        sandbox = TreeSandbox(make_environment(plan.python, requirements, cache), paths, _RECORDING_SECONDS + 60)
        found = sandbox.run_program(tree, _HERE / "recorder.py", given)
        try:
            recorded = Recorded.model_validate(found)
        except ValidationError:  # the tests ended it, or wrote something else in its place
            recorded = Recorded(late=True)
        if recorded.calls:
            write_file(kept, recorded.model_dump_json(), parents=True)
    slicer = PackageSlicer({short: tree.text(path) or "" for short, path in code.items()})
    candidates: list[tuple[SlicedFunction, list[Call]]] = []
    for short, path in code.items():
        if not all(map(_is_name, modules[short].split("."))):
            continue  # a test could not import it
        for key, calls in recorded.calls.items():
            if key.rpartition(":")[0] == path and calls and (sliced := slicer.slice(short, key.rpartition(":")[2])):
                writable = [call for call in calls if all(map(_is_name, call[1]))]
                candidates.append((sliced, varied(writable, f"{plan.seed} {package.name} {key}")))
    return _agreed(candidates), recorded


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _below(path: str, paths: Sequence[str]) -> str:
    return next((path[len(root) + 1 :] for root in paths if path.startswith(f"{root}/")), path)


def _agreed(candidates: Sequence[tuple[SlicedFunction, list[Call]]]) -> list[CheckedFunction]:
    """The functions with enough calls whose outcomes are the same in all runs."""
    runs = _outcomes([(each, each.text, calls) for each, calls in candidates], range(RUNS), as_graded=False)
    checked: list[CheckedFunction] = []
    for (sliced, calls), outcomes in zip(candidates, zip(*runs, strict=True), strict=True):
        good = [
            (call, first)
            for call, first, *others in zip(calls, *outcomes, strict=True)
            if first is not None and all(other == first for other in others)
        ]
        if len(good) >= LEAST_CALLS and len({outcome for _, outcome in good}) > 1:
            kept = [call for call, _ in good]
            checked.append(CheckedFunction(sliced=sliced, calls=tuple(kept), expected=tuple(text for _, text in good)))
    return checked


_CALLS = TypeAdapter(list[Call])
_RUN = TypeAdapter(list[list[str | None] | None])

type _Work = tuple[SlicedFunction, str, Sequence[Call]]


def _outcomes(work: Sequence[_Work], seeds: Sequence[int], *, as_graded: bool = True) -> list[list[list[str | None]]]:
    """For each hash seed, for each function, the outcomes of its calls; ``as_graded``: derived classes count, too."""
    given: JsonValue = [
        {
            "path": each.path,
            "name": each.name,
            "text": text,
            "calls": _CALLS.dump_python([*calls], mode="json"),
            "kinds": as_graded,
        }
        for each, text, calls in work
    ]
    sandbox = TreeSandbox(Path(sys.base_prefix), (), timeout=60 + 3.0 * len(work))
    found: list[list[list[str | None]]] = []
    for seed in seeds:
        result = sandbox.run_program(_NOWHERE, _HERE / "calling.py", given, hash_seed=seed) if given else []
        rows = [None] * len(work) if result is None else _RUN.validate_python(result)
        found.append([row or [None] * len(calls) for row, (_, _, calls) in zip(rows, work, strict=True)])
    return found


def tasks_of(
    package: Package, plan: RepairPlan, functions: Sequence[CheckedFunction], kinds: Counter[str]
) -> Iterator[tuple[Instance, TaskLineage]]:
    """The tasks of a package, one bug of each function in turn; of the bugs of a function the rarest kinds so far."""
    order = random.Random(f"{plan.seed} {package.name}")
    tried: list[tuple[CheckedFunction, str, str]] = []
    for each in functions:
        found = sorted(bugs_in(each.sliced.text, each.sliced.name))
        order.shuffle(found)
        tried += [(each, kind, text) for kind, text in found[:_MOST_BUGS]]
    [once] = _outcomes([(each.sliced, text, each.calls) for each, _, text in tried], [0])
    tried = [bug for bug, outcomes in zip(tried, once, strict=True) if _detected(bug[0], outcomes)]
    runs = _outcomes([(each.sliced, text, each.calls) for each, _, text in tried], range(RUNS))
    left: dict[str, list[_Bug]] = {}
    for (each, kind, text), outcomes in zip(tried, zip(*runs, strict=True), strict=True):
        if all(other == outcomes[0] for other in outcomes) and _detected(each, outcomes[0]):
            left.setdefault(each.sliced.name, []).append(_Bug(kind=kind, text=text, outcomes=tuple(outcomes[0])))
    for _ in range(plan.per_function):
        for each in functions:
            bugs = left.get(each.sliced.name, [])
            if bugs:
                best = min(range(len(bugs)), key=lambda at: (kinds[bugs[at].kind], at))
                bug = bugs.pop(best)
                left[each.sliced.name] = [other for other in bugs if other.kind != bug.kind]
                kinds[bug.kind] += 1
                yield _task(package, each, bug, plan.seed)


def _detected(each: CheckedFunction, outcomes: Sequence[str | None]) -> bool:
    """Whether some calls, and not all, give something else, as tests and grading compare."""
    wrong = sum(not same(found, wanted) for found, wanted in zip(outcomes, each.expected, strict=True))
    return 0 < wrong < len(each.calls)


def _task(package: Package, each: CheckedFunction, bug: _Bug, seed: int) -> tuple[Instance, TaskLineage]:
    sliced = each.sliced
    order = random.Random(f"{seed} {package.name} {sliced.name} {bug.kind}")
    places = sorted(range(len(each.calls)), key=lambda at: len(repr(each.calls[at])) + len(each.expected[at]))
    failing = [at for at in places if not same(bug.outcomes[at], each.expected[at])]
    passing = [at for at in places if at not in failing]
    shown = sorted([*failing[:SHOWN_FAILING], *_various(each, passing)[:SHOWN_PASSING]])
    hidden = [at for at in range(len(each.calls)) if at not in shown]
    order.shuffle(hidden)
    chosen = [*shown, *hidden[:HIDDEN]]
    test_file = f"test_{sliced.name.strip('_')}.py"
    tests = {at: f"{test_file}::test_{number}" for number, at in enumerate(shown, 1)}
    files = {sliced.path: bug.text, test_file: _tests_text(each, shown)}
    spec = RepairSpec(
        package=package.label,
        license=package.license,
        kind=bug.kind,
        path=sliced.path,
        function=sliced.name,
        line=_first_change(bug.text, sliced.text),
        files=files,
        calls=tuple(each.calls[at] for at in chosen),
        expected=tuple(each.expected[at] for at in chosen),
        shown=len(shown),
    )
    fails = tuple(tests[at] for at in shown if at in failing)
    instance = Instance(
        instance_id=f"{package.name}-{sliced.name}-{bug.kind.replace(' ', '-')}",
        repo=package.name,
        version=package.release.version if package.release else "",
        base_commit=commit_of(repository_files(spec)),
        problem_statement=statement(spec, 3, fails),
        patch=patch_of(sliced.path, bug.text, sliced.text),
        fail_to_pass=fails,
        pass_to_pass=tuple(tests[at] for at in shown if at not in failing),
        extra={"split": package.split, COLUMN: spec.model_dump(mode="json")},
    )
    lineage = TaskLineage(
        instance_id=instance.instance_id,
        source=_source(package),
        modifier=bug.kind,
        seed=seed,
        path=sliced.path,
        function=sliced.name,
        validation=Validation(runs_without_bug=RUNS, runs_with_bug=RUNS, tests=len(chosen), failing=len(failing)),
        check=Check(repeats=RUNS, oracle=RUNS, no_op=0, same_outcomes=True),
    )
    return instance, lineage


def _source(package: Package) -> JsonObject:
    if package.git is not None:
        return {"git": package.git, "commit": package.commit}
    return {
        "sdist": package.name,
        "version": package.release.version if package.release else "",
        "license": package.license,
    }


def _various(each: CheckedFunction, places: Sequence[int]) -> list[int]:
    """Calls with different outcomes first."""
    first = {each.expected[at]: at for at in reversed(places)}
    new = [at for at in places if first[each.expected[at]] == at]
    return [*new, *(at for at in places if at not in new)]


def _tests_text(each: CheckedFunction, shown: Sequence[int]) -> str:
    parts = [f"from {_module(each.sliced.path)} import {each.sliced.name}"]
    for number, at in enumerate(shown, 1):
        positional, keywords = each.calls[at]
        words = ", ".join([*positional, *(f"{name}={text}" for name, text in keywords.items())])
        call = f"{each.sliced.name}({words})"
        expected = each.expected[at]
        left = f"list({call})" if expected.startswith("list:") else call
        parts.append(f"def test_{number}():\n    assert {left} == {plain(expected)}")
    text = "\n\n".join(parts) + "\n"
    ast.parse(text)
    return text


def _first_change(old: str, new: str) -> int:
    blocks = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    return next(min(start + 1, len(old.splitlines())) for tag, start, *_ in blocks if tag != "equal")


ROWS = "own.jsonl"
_SEED = 1  # whatever the run's: runs with other seeds are evaluated on the same tasks
_A_FUNCTION, _AT_MOST = 4, 400
_LEAST_FUNCTIONS = 4
_LEAST_KEPT = 0.7
"""The share of the tasks below which a split by file is given up for one by function."""


class OwnTasks(Frozen):
    """The tasks of a repository at ``commit``, as rows that say nothing of where the bug is (``at_level``)."""

    name: str
    commit: str
    training: tuple[Instance, ...]
    held_out: tuple[Instance, ...]

    def line(self) -> str:
        """What there is, for a person."""
        parts = [
            f"{len(rows)} {what} ({counted(_functions(rows), 'function')} in {counted(len(_files(rows)), 'file')})"
            for rows, what in ((self.training, "to train on"), (self.held_out, "held out"))
        ]
        shared = _files(self.training) & _files(self.held_out)
        apart = "functions, in the same files" if shared else "files"
        return f"tasks of {self.name}: {', '.join(parts)}; they are apart by {apart}"


def make_own_tasks(
    repository: OwnRepository,
    folder: Path,
    cache: Path,
    *,
    most_held_out: int,
    tests: tuple[str, ...] = (),
    requirements: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Make the tasks of a repository, which ``own_tasks`` reads from ``folder``. Lines on what is missing among them.

    Half of them are held out, ``most_held_out`` at most, in files that no other task changes, or in other functions
    where that would leave too many out. No task to train on shows a held-out function. ``tests``: pytest's arguments
    (empty: the folders that are found); ``requirements``: installed beside what the repository declares. Raises
    ``ConfigError`` without bubblewrap and where there are too few functions, and ``InfrastructureError`` where what the
    tests need cannot be installed.
    """
    made, recorded = _made(repository, cache, tests, requirements)
    parts = _divided(made, most_held_out)
    if len({*parts.values()}) < 2:
        made_of = f"{len(made)} tasks, of functions that cannot be divided, as most of them call each other"
        raise ConfigError(_too_few(repository, made_of))
    kept = [(row, entry) for row, entry in made if row.instance_id in parts]
    rows = [row.model_copy(update={"extra": {**row.extra, "split": parts[row.instance_id]}}) for row, _ in kept]
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / ROWS, rows, [entry for _, entry in kept])
    notes: list[str] = []
    if why := _why(recorded):
        notes.append(f"there would be more tasks{why}: see --with and --tests, and start over with --fresh")
    if left := len(made) - len(kept):
        notes.append(f"{counted(left, 'task')} would show what is held out, or unbalance the parts: left out")
    return tuple(notes)


def own_tasks(folder: Path, name: str) -> OwnTasks | None:
    """What ``make_own_tasks`` left of the repository with that name; ``None`` before it has ended.

    Raises ``ConfigError`` for rows that have changed since.
    """
    file = folder / ROWS
    known = read_lineage(file)  # it is written after the rows
    if known is None:
        return None
    if not file.exists() or known.sha256 != file_sha256(file):
        raise ConfigError(f"{file} has changed since it was made: start over with --fresh")
    rows = read_instances(file)
    training, held_out = (tuple(each for each in rows if each.extra["split"] == part) for part in (TRAIN, HELD_OUT))
    commit = str(known.tasks[0].source["commit"])
    return OwnTasks(name=name, commit=commit, training=training, held_out=held_out)


def shown_functions(instance: Instance) -> frozenset[str]:
    """The functions that a task shows: its own, and those that come along because it needs them."""
    spec = spec_of(instance)
    tree = ast.parse(spec.files[spec.path])
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _made(
    repository: OwnRepository, cache: Path, tests: tuple[str, ...], requirements: tuple[str, ...]
) -> tuple[list[tuple[Instance, TaskLineage]], Recorded]:
    find_bubblewrap()
    package = Package(name=repository.name, git=str(repository.root), commit=repository.commit, tests=tests)
    layout = layout_of(fetch(package, cache)[1])
    if not layout.code:
        raise ConfigError(f"--repo {repository.root}: no Python code found in it beside the tests")
    package = package.model_copy(update={"requirements": (*layout.requirements, *requirements)})
    plan = RepairPlan(packages=(package,), per_function=_A_FUNCTION, per_package=_AT_MOST, seed=_SEED)
    found, recorded = checked_functions(package, plan, cache)
    # Of those that share a name the first: a task is named after its function.
    functions = [*{each.sliced.name: each for each in reversed(found)}.values()]
    made = list(tasks_of(package, plan, functions, Counter()))[: plan.per_package]
    if len(made) < LEAST_TRAINING + LEAST_HELD_OUT or len(functions) < _LEAST_FUNCTIONS:
        what = f"{counted(len(made), 'task')} of {counted(len(functions), 'function')}"
        raise ConfigError(_too_few(repository, f"{what}{_why(recorded)}"))
    return made, recorded


def _divided(made: Sequence[tuple[Instance, TaskLineage]], most_held_out: int) -> dict[str, str]:
    """Task -> its part; empty where there are no two parts.

    By file, without tasks to train on that show a held-out function; by function where that leaves too many out: those
    that one task shows stay together.
    """
    shows = {row.instance_id: shown_functions(row) for row, _ in made}
    files = {row.instance_id: entry.path for row, entry in made}
    functions = {row.instance_id: entry.function for row, entry in made}
    together = _together(shows.values())
    half = max(LEAST_HELD_OUT, min(most_held_out, len(made) // 2))
    for keys in (files, {task: together[function] for task, function in functions.items()}):
        tasks = [SplitTask(id=task, files=frozenset({key})) for task, key in keys.items()]
        try:
            split = split_tasks(tasks, len(tasks) - half, half, seed=_SEED)
        except ConfigError:
            continue
        held_out = {functions[task] for task in split.held_out}
        training = [task for task in split.training if shows[task].isdisjoint(held_out)]
        if len(training) >= LEAST_TRAINING and len(training) + len(split.held_out) >= _LEAST_KEPT * len(tasks):
            return {**dict.fromkeys(training, TRAIN), **dict.fromkeys(split.held_out[:most_held_out], HELD_OUT)}
    return {}


def _together(groups: Iterable[frozenset[str]]) -> dict[str, str]:
    """Function -> one that stands for all that are shown with it, directly or through others."""
    of: dict[str, set[str]] = {}
    for group in groups:
        joined = {*group}.union(*(of.get(name, ()) for name in group))
        of.update(dict.fromkeys(joined, joined))
    return {name: min(joined) for name, joined in of.items()}


def _why(recorded: Recorded) -> str:
    """What stood in the way, as far as it is known."""
    if recorded.late:
        return ", as its tests did not end in time"
    if recorded.broken:
        file, reason = next(iter(recorded.broken.items()))
        return f", as {counted(len(recorded.broken), 'file')} of tests cannot be imported ({file:.80}: {reason:.120})"
    return ""


def _too_few(repository: OwnRepository, found: str) -> str:
    return (
        f"--repo {repository.root}: {found}; at least {LEAST_TRAINING} tasks to train on and {LEAST_HELD_OUT} held "
        f"out, of {_LEAST_FUNCTIONS} functions, are needed. Used are functions of modules, of 3 to 25 lines, that need "
        "no other package, and that its tests or doctests call with plain values (texts, numbers, lists of them). "
        "Where tests fail for want of a package, name it (--with); where they are not found, or too slow, name some "
        "(--tests); `openhands-rl improve` makes tasks of any code"
    )


def _functions(rows: tuple[Instance, ...]) -> int:
    return len({spec_of(each).function for each in rows})


def _files(rows: tuple[Instance, ...]) -> set[str]:
    return {spec_of(each).path for each in rows}
