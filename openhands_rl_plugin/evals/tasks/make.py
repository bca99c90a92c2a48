"""Makes tasks (bugs that tests notice, and past fixes), checks them by the quality gate, splits and lists them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import re
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, JsonValue
from rich.table import Table

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import scratch_folder, write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.backends import LocalBackend
from openhands_rl_plugin.evals.swe.grading import Grading, TestRun, run_tests
from openhands_rl_plugin.evals.swe.instances import Instance, InstanceBackend, VerdictKind, row_of
from openhands_rl_plugin.evals.swe.recipes import PYTHON
from openhands_rl_plugin.evals.tasks.bugs import Bug, PythonSource, bugs_of, patch_of
from openhands_rl_plugin.evals.tasks.source import Source, commit_files, is_test, requirements_of
from openhands_rl_plugin.trajectories.view import table

PAST_FIX = "reopen_fix"
"""The kind of bug of a row whose bug is a reverted past fix."""
MADE_BY = "made_by"
"""The column with the kind of bug."""
LARGEST_SHARE = 0.6
"""The fraction of tests that may fail with the bug."""
TRIES_PER_TASK = 20
LEAK_LENGTH = 12
_LEAST_STEADY = 0.5
_MOST_SHOWN, _MOST_NAMED, _MOST_TEXT = 2, 6, 4_000
_UNSTABLE = re.compile(r"0x[0-9a-f]{6,}|\d+\.\d{9,}s")
_LOOKED_THROUGH, _MOST_FILES, _TRIES_PER_FIX = 400, 6, 4
_PYTEST = "python -m pytest"


class TaskPlan(Frozen):
    """A repository and the tasks to make of it.

    ``requirements``: packages for the tests that the repository does not declare; ``tests``: pytest's arguments;
    ``python``: its version; ``timeout``: of one run, in seconds.
    """

    source: Source
    python: str = Field(default=PYTHON, pattern=r"^3\.1\d$")
    requirements: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    wanted: int = Field(default=4, ge=1, le=1000)
    seed: int = 1
    timeout: float = Field(default=60.0, gt=0)


type OnTried = Callable[[int, str], None]
"""The tasks so far, and why the last change is no task (empty when it is one)."""


@dataclass(frozen=True)
class Prepared:
    """A commit whose ``tests`` passed twice. ``run`` runs all of them after a patch."""

    plan: TaskPlan
    texts: Mapping[str, str]
    run: Callable[[str], Awaitable[TestRun]]
    instance: Instance
    tests: frozenset[str]


async def prepare(plan: TaskPlan, cache: Path, commit: str = "") -> Prepared:
    """Run the tests of a commit twice. Raises ``ConfigError`` where they are of no use, and ``InfrastructureError``."""
    source = plan.source.model_copy(update={"commit": commit or plan.source.commit})
    texts = source.texts(source.commit)
    folders = [f"/testbed/{root}" for root in ("src", "lib") if any(path.startswith(f"{root}/") for path in texts)]
    listed = "\\n".join(folders or ["/testbed"])
    importable = f"open(sysconfig.get_path('purelib') + '/testbed.pth', 'w').write('{listed}\\n')"
    words = ["-rA", "-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors", *plan.tests]
    packages = requirements_of(texts, ("pytest==8.4.2", *plan.requirements))
    extra: dict[str, JsonValue] = {
        "source": {"git": source.git, "commit": source.commit, "label": source.name},
        "python": plan.python,
        # No code of a package runs: wheels are unpacked.
        "packages": ["--only-binary=:all:", *packages],
        "install": [f'python -c "import sysconfig; {importable}"'],
        "test_command": f"{_PYTEST} {' '.join(map(shlex.quote, words))}",
        "test_files": [],
        "log_parser": "pytest",
    }
    version = source.commit[:8]
    name = f"git__{source.name}-{version}"
    instance = Instance(
        instance_id=name, repo=f"git/{source.name}", base_commit=source.commit, version=version, extra=extra
    )
    backend = LocalBackend(cache=cache)
    await backend.check()
    recipe = await backend.recipe(instance)
    open_box = functools.partial(backend.box, instance, recipe)

    async def run(patch: str) -> TestRun:
        return await run_tests(
            Grading(open_box, instance, recipe, patch, plan.timeout), patch, recipe.evaluation_script
        )

    first = await run(NO_OP)
    if first.cut:
        raise ConfigError(f"{source.name}: {first.cut}; run fewer tests (--tests), or give more time")
    ran = {name for name, status in first.statuses.items() if status != "SKIPPED"}
    steady = _passed(first) & _passed(await run(NO_OP))
    if len(steady) < 2 or len(steady) < _LEAST_STEADY * len(ran):
        last = next((line for line in reversed((first.log.tests or "").splitlines()) if line.startswith("E  ")), "")
        raise ConfigError(
            f"{source.name}: {len(steady)} of {len(ran)} tests pass twice, which are too few: mend them, install what "
            f"they need (--with), or name those that pass (--tests){f'; {last:.200}' if last else ''}"
        )
    return Prepared(plan, texts, run, instance, frozenset(steady))


def _passed(run: TestRun) -> set[str]:
    """The tests that passed and whose names were not cut off in the log."""
    whole = (name for name, status in run.statuses.items() if status == "PASSED" and ".py::" in name)
    return {name for name in whole if "[" not in name or name.endswith("]")}


async def make_tasks(plan: TaskPlan, out: Path, cache: Path, on_tried: OnTried) -> int:
    """Make the tasks of a plan and write them to ``out``; their number.

    Up to half of them are of the newest fixes, the others of bugs. They depend on the plan alone. Raises
    ``ConfigError`` for a repository that gives no task.
    """
    made: list[Instance] = []

    async def attempt(change: Awaitable[Instance | str]) -> bool:
        task = await change
        if isinstance(task, Instance) and any(each.fail_to_pass == task.fail_to_pass for each in made):
            task = "another task fails the same tests"
        made.extend([task] if isinstance(task, Instance) else [])
        on_tried(len(made), task if isinstance(task, str) else "")
        return isinstance(task, Instance)

    prepared = await prepare(plan, cache)
    for commit, time in islice(_fixes(plan.source), plan.wanted // 2 * _TRIES_PER_FIX):
        if len(made) < plan.wanted // 2:
            await attempt(_past_fix(plan, cache, commit, time))
    used: set[tuple[str, str]] = set()
    for bug in candidates(prepared)[: (plan.wanted - len(made)) * TRIES_PER_TASK]:
        if len(made) == plan.wanted:
            break
        key = hashlib.sha256(repr((bug.path, bug.function, bug.edits)).encode()).hexdigest()[:12]
        wrong = {bug.path: PythonSource(prepared.texts[bug.path]).apply(bug.edits)}
        place = (bug.path, bug.function)
        if place not in used and await attempt(try_change(prepared, key, wrong, bug.kind)):
            used.add(place)
    if not made:
        raise ConfigError(f"{plan.source.name}: no bug gives a good task")
    write_tasks(out, made)
    return len(made)


def candidates(prepared: Prepared) -> list[Bug]:
    """The bugs in an order that depends on the seed only: kinds alternate."""
    order = random.Random(f"{prepared.plan.seed}:{prepared.plan.source.name}:{prepared.plan.source.commit}")
    bugs = [bug for path, text in prepared.texts.items() if not is_test(path) for bug in bugs_of(path, text)]
    order.shuffle(bugs)
    earlier: Counter[str] = Counter()
    turns: list[tuple[int, Bug]] = []
    for bug in bugs:
        turns.append((earlier[bug.kind], bug))
        earlier[bug.kind] += 1
    return [bug for _, bug in sorted(turns, key=itemgetter(0))]


def _fixes(source: Source) -> Iterator[tuple[str, int]]:
    """Commits and their times in Unix seconds, newest first, that change Python code and tests, and few other files."""
    log = source.read(
        *("log", "--first-parent", "--no-merges", f"--max-count={_LOOKED_THROUGH}", "--format=%x00%H %ct %P"),
        *("--name-status", "--no-renames", source.commit),
    )
    for entry in log.decode("utf-8", "replace").split("\0")[1:]:
        first, _, rest = entry.partition("\n")
        files = [line.split("\t") for line in rest.splitlines() if "\t" in line]
        python = [path for status, path in files if path.endswith(".py") and status == "M"]
        tests = [path for path in python if is_test(path)]
        if len(first.split()) == 3 and tests and len(tests) < len(python) <= _MOST_FILES:
            yield first.split()[0], int(first.split()[1])


async def _past_fix(plan: TaskPlan, cache: Path, commit: str, time: int) -> Instance | str:
    """The task of one fix: the code before it, with the tests after it."""
    try:
        prepared = await prepare(plan, cache, commit)
    except ConfigError as error:
        return str(error)
    before = plan.source.texts(f"{commit}^")
    code = {
        path: before[path]
        for path, text in prepared.texts.items()
        if path.endswith(".py") and not is_test(path) and before.get(path, text) != text
    }
    return await try_change(prepared, commit[:12], code, PAST_FIX, datetime.fromtimestamp(time, UTC).isoformat())


async def try_change(
    prepared: Prepared, key: str, wrong: Mapping[str, str], kind: str, created: str = ""
) -> Instance | str:
    """Run the tests twice with the texts ``wrong``: a task, or the reason why it would be none."""
    right, tests = prepared.texts, prepared.tests
    bug = "".join(patch_of(path, right[path], text) for path, text in wrong.items())
    first = await prepared.run(bug)
    failing = tests - _passed(first)
    if first.cut:
        return first.cut
    if not tests <= first.statuses.keys():
        return "tests disappear with it"
    if not failing:
        return "no test notices it"
    if len(failing) > LARGEST_SHARE * len(tests):
        return f"{len(failing)} of {len(tests)} tests fail"
    second = await prepared.run(bug)
    if second.cut or failing != tests - _passed(second):
        return "two runs with the bug differ"
    statement = _statement(prepared, first, failing)
    if statement is None or statement != _statement(prepared, second, failing):
        return "no output of what fails is the same in two runs"
    files = sorted({test.partition("::")[0] for test in failing})
    if missing := [path for path in files if path not in right]:
        return f"{missing[0]} is no file of Python tests"
    patch = "".join(patch_of(path, text, right[path]) for path, text in wrong.items())
    if leaks(statement, patch):
        return "the output shows a line of the fix"
    test_patch = "".join(patch_of(path, None, right[path]) for path in files)
    source = prepared.plan.source.model_copy(update={"commit": prepared.instance.base_commit})
    with scratch_folder("tasks") as folder:
        base = commit_files(folder / "task.git", source, source.name, patch=patch + test_patch)
    return prepared.instance.model_copy(
        update={
            "instance_id": f"{prepared.instance.instance_id}-{key[:8]}",
            "base_commit": base,
            "problem_statement": statement,
            "created_at": created,
            "patch": patch,
            "test_patch": test_patch,
            "fail_to_pass": tuple(sorted(failing)),
            "pass_to_pass": tuple(sorted(tests - failing)),
            "extra": {**prepared.instance.extra, MADE_BY: kind},
        }
    )


def _statement(prepared: Prepared, run: TestRun, failing: Iterable[str]) -> str | None:
    """The output of the failing tests that say it shortest; ``None`` where it differs from run to run."""
    shown = failures(run.log.tests or "")
    outputs = {test: shown.get(".".join(test.split("::")[1:]), "") for test in sorted(failing)}
    found = sorted((len(text), test) for test, text in outputs.items() if text and not _UNSTABLE.search(text))
    if not found:
        return None
    best = [test for _, test in found[:_MOST_SHOWN]]
    parts = [f"Tests of {prepared.plan.source.name} fail with Python {prepared.plan.python}."]
    parts += [f"`{test}`:\n\n```\n{outputs[test]}\n```" for test in best]
    if others := [f"- `{test}`" for test in outputs if test not in best]:
        parts.append("\n".join(["These fail, too:\n", *others[:_MOST_NAMED]]))
    return "\n\n".join(parts) + "\n"


def failures(log: str) -> dict[str, str]:
    """Test without its file, as in pytest's headings -> the lines of the test and of the error, without those of the
    code that the test calls."""
    found = re.search(r"^=+ FAILURES =+\n(.*?)^=+ ", log, re.MULTILINE | re.DOTALL)
    parts = re.split(r"^_+ (?!_)(.+?) _+$\n", found[1] if found else "", flags=re.MULTILINE)[1:]
    outputs: dict[str, str] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        own, _, called = text.partition("\n_ _ _")
        lines = [own.strip("\n"), *(line for line in called.splitlines() if line.startswith("E "))]
        outputs.setdefault(name, "\n".join(lines)[-_MOST_TEXT:])
    return outputs


def leaks(statement: str, patch: str) -> bool:
    """Whether a changed line of a patch that is longer than ``LEAK_LENGTH`` characters stands in a statement."""
    return any(line in statement for line in changed_lines(patch) if len(line) > LEAK_LENGTH)


def changed_lines(patch: str) -> list[str]:
    """The added and removed lines of a patch, without what is around them."""
    return [
        line[1:].strip() for line in patch.splitlines() if line[:1] in "+-" and not line.startswith(("+++ ", "--- "))
    ]


def write_tasks(path: Path, instances: Iterable[Instance]) -> None:
    """Write the rows, all or none. Raises ``StorageError``."""
    rows = (json.dumps(row_of(each), ensure_ascii=False) + "\n" for each in instances)
    write_file(path, "".join(rows), parents=True)


NO_OP = """diff --git a/no_op.txt b/no_op.txt
new file mode 100644
--- /dev/null
+++ b/no_op.txt
@@ -0,0 +1 @@
+Nothing is changed.
"""
"""A patch that applies and has no effect: an empty patch would not run the tests."""


async def check_tasks(
    instances: Sequence[Instance],
    backend: InstanceBackend,
    *,
    repeats: int = 2,
    workers: int = 2,
    timeout: float = 600.0,
    on_checked: Callable[[str], object] = lambda name: None,
) -> dict[str, tuple[str, ...]]:
    """The quality gate: what is wrong with each task, by its id. Its own patch has to resolve it in each of ``repeats``
    runs, one without effect in none, and no earlier task of its repository has the same fix.

    ``timeout`` is in seconds for one run of the tests. Raises ``ConfigError``, and ``InfrastructureError`` without a
    usable back end.
    """
    await backend.check()
    turns, first = asyncio.Semaphore(workers), dict[tuple[str, str], str]()
    same = {each.instance_id: first.setdefault((each.repo, each.patch), each.instance_id) for each in instances}

    async def checked(instance: Instance) -> tuple[str, ...]:
        runs = [(name, at) for name in ("oracle", "no-op") for at in range(repeats)]
        async with turns:
            with scratch_folder("check") as folder:
                verdicts = [
                    await backend.grade(
                        instance,
                        instance.patch if name == "oracle" else NO_OP,
                        logs=folder / f"{name}-{at}" / instance.instance_id,
                        timeout=timeout,
                    )
                    for name, at in runs
                ]
        on_checked(instance.instance_id)
        oracle, no_op = verdicts[:repeats], verdicts[repeats:]
        problems: list[str] = []
        if (solved := sum(each.resolved for each in oracle)) < repeats:
            why = next((f" ({each.reason})" for each in oracle if each.reason), "")
            problems.append(f"its own patch resolves it in {solved} of {repeats} runs{why}")
        if kinds := {each.kind for each in no_op} - {VerdictKind.UNRESOLVED}:
            why = next((f" ({each.reason})" for each in no_op if each.reason), "")
            problems.append(f"changing nothing gives {', '.join(sorted(kinds))}{why}")
        if any(len({(e.kind, e.fail_to_pass, e.pass_to_pass) for e in each}) > 1 for each in (oracle, no_op)):
            problems.append("its tests come out differently from run to run")
        if (other := same[instance.instance_id]) != instance.instance_id:
            problems.append(f"it is {other} once more")
        return tuple(problems)

    found = await asyncio.gather(*map(checked, instances))
    return {instance.instance_id: problems for instance, problems in zip(instances, found, strict=True)}


def table_of(instances: Iterable[Instance]) -> Table:
    """One line a task: its split, how its bug was made, and how many tests fail with it and pass."""
    rows: list[tuple[str, ...]] = []
    for each in instances:
        noted = (str(each.extra.get(name) or "") for name in ("split", MADE_BY))
        rows.append((each.instance_id, *noted, str(len(each.fail_to_pass)), str(len(each.pass_to_pass))))
    return table(("task", "split", "made by", "fail", "pass"), rows, numbers=("fail", "pass"))


LEAST_TRAINING, LEAST_HELD_OUT = 4, 4
"""Below these a run says nothing: it is refused."""
_ORDERS = 500


class SplitTask(NamedTuple):
    """``files``: those that its fix changes. ``time``: of a fix's commit, ISO 8601 in UTC; empty: injected."""

    id: str
    files: frozenset[str]
    time: str = ""


class TaskSplit(NamedTuple):
    """The ids of both parts."""

    training: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()

    @property
    def enough(self) -> bool:
        """Whether each part has as many as a run needs."""
        return len(self.training) >= LEAST_TRAINING and len(self.held_out) >= LEAST_HELD_OUT


def split_tasks(tasks: Sequence[SplitTask], training: int, held_out: int, *, seed: int) -> TaskSplit:
    """At most so many of each part, in the tasks' order; fewer tasks than both are shared out in the same proportion.

    Of many random sets of files to hold out, it takes the one that gives enough, is near the goal and leaves few out.
    Raises ``ConfigError`` where a part has fewer than ``LEAST_TRAINING`` or ``LEAST_HELD_OUT`` even so.
    """
    goal = min(held_out, max(LEAST_HELD_OUT, round(len(tasks) * held_out / (training + held_out))))
    count = Counter(file for task in tasks for file in task.files)
    files, order = sorted(count), random.Random(seed)
    splits = [TaskSplit()]
    for _ in range(_ORDERS if tasks else 0):
        order.shuffle(files)
        before = accumulate((count[file] for file in files), initial=0)
        splits.append(_cut(tasks, {file for file, so_far in zip(files, before, strict=False) if so_far < goal}))
    best = max(splits, key=lambda each: (each.enough, -abs(len(each.held_out) - goal), len(each.training)))
    if not best.enough:
        raise ConfigError(
            f"too few tasks: {len(best.training)} to train on and {len(best.held_out)} held out of {len(tasks)} good "
            f"ones, which change {len(files)} files; at least {LEAST_TRAINING} and {LEAST_HELD_OUT} are needed that "
            "share no file: ask for more (--tasks, --held-out)"
        )
    return TaskSplit(best.training[:training], best.held_out[:held_out])


def _cut(tasks: Sequence[SplitTask], files: set[str]) -> TaskSplit:
    """The parts of one choice of files, with the cut in time that keeps most fixes."""
    held_out = [task for task in tasks if task.files <= files]
    training = [task for task in tasks if not task.files & files]
    new, old = ([task.time for task in part if task.time] for part in (held_out, training))
    cuts = sorted({*new, *old, "9"})
    cut = max(cuts, key=lambda cut: sum(time >= cut for time in new) + sum(time < cut for time in old))
    return TaskSplit(
        training=tuple(task.id for task in training if task.time < cut),
        held_out=tuple(task.id for task in held_out if not task.time or task.time >= cut),
    )
