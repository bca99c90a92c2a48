"""Runs tests and programs in bubblewrap, prepares a package for bugs, and takes failing tests out of it."""

from __future__ import annotations

import ast
import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, JsonValue, ValidationError

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import read_left, scratch_folder
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.sandbox import (
    OF_A_PREFIX,
    SandboxLimits,
    bounded,
    prefix_mounts,
    sandboxed,
)
from openhands_rl_plugin.evals.swe.recipes.swe_bench import parse_pytest
from openhands_rl_plugin.evals.tasks.bugs import FUNCTIONS, Edit, PythonSource, definitions, parse
from openhands_rl_plugin.evals.tasks.packages import (
    Package,
    PackageLayout,
    SourceOrigin,
    TaskPlan,
    fetch,
    layout_of,
    make_environment,
)
from openhands_rl_plugin.evals.tasks.trees import SourceTree


def file_of(test: str) -> str:
    """``tests/test_a.py::TestB::test_c[1]`` -> ``tests/test_a.py``."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """``tests/test_a.py::TestB::test_c[1]`` -> ``test_c``; empty for a test that is no function."""
    return test.partition("[")[0].split("::")[-1] if "::" in test else ""


def without_tests(tree: SourceTree, tests: Iterable[str]) -> Mapping[str, str | None]:
    """New texts of the test files, without the functions of ``tests``; ``None`` deletes the file.

    A file is deleted when one of the tests is no function in it, or when no other test is left.
    """
    functions: dict[str, set[str]] = {}
    for test in tests:
        functions.setdefault(file_of(test), set()).add(function_of(test))
    return {path: _without(tree.text(path), names) for path, names in sorted(functions.items())}


def _without(text: str | None, names: set[str]) -> str | None:
    if text is None:
        return None
    try:
        source = PythonSource(text)
    except SyntaxError:
        return None
    found = [(parent, node) for parent, node in _functions(source.tree) if node.name in names]
    if {node.name for _, node in found} != names or not all(source.stands_alone(node) for _, node in found):
        return None
    left = [node for _, node in _functions(source.tree) if node.name.startswith("test") and node.name not in names]
    if not left:
        return None
    edits: list[Edit] = []
    for parent in {id(parent): parent for parent, _ in found}.values():
        gone = [node for of, node in found if of is parent]
        edits += _deletions(source, parent, gone)
    try:
        new = source.apply(_outermost(edits))
        parse(new)
    except (SyntaxError, ValueError):
        return None
    return new


def _functions(tree: ast.Module) -> Iterable[tuple[ast.Module | ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]]:
    parents: list[ast.Module | ast.ClassDef] = [tree]
    parents += [node for _, node in definitions(tree) if isinstance(node, ast.ClassDef)]
    for parent in parents:
        for statement in parent.body:
            if isinstance(statement, FUNCTIONS):
                yield parent, statement


def _deletions(source: PythonSource, parent: ast.Module | ast.ClassDef, gone: Sequence[ast.stmt]) -> list[Edit]:
    if isinstance(parent, ast.ClassDef) and not _needed(source, parent, gone):
        return [_deletion(source, parent)]
    edits = [_deletion(source, node) for node in gone]
    if len(gone) == len(parent.body):
        start, end = source.lines(gone[0])
        edits[0] = Edit(start=start, end=end, text=f"{source.indentation(gone[0])}pass\n")
    return edits


def _needed(source: PythonSource, owner: ast.ClassDef, gone: Sequence[ast.stmt]) -> bool:
    """Whether a class has more than ``gone`` and a docstring, or others name it."""
    left = [node for node in owner.body if node not in gone and not _is_text(node)]
    named = any(isinstance(node, ast.Name) and node.id == owner.name for node in ast.walk(source.tree))
    return bool(left) or named


def _deletion(source: PythonSource, node: ast.stmt) -> Edit:
    """Its lines, and the empty ones before them."""
    start, end = source.lines(node)
    before = source.data[:start]
    while before.endswith(b"\n\n"):
        before = before[:-1]
    return Edit(start=len(before), end=end, text="")


def _outermost(edits: list[Edit]) -> list[Edit]:
    return [
        edit
        for edit in edits
        if not any(each is not edit and each.start <= edit.start and edit.end <= each.end for each in edits)
    ]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


INSIDE = "/tmp/testbed"
_LIMITS = SandboxLimits(memory=4 * 1024**3)
_LONGEST_REPORT = 256 * 1024**2
PYTEST = ("-o", "addopts=", "-p", "no:cacheprovider")
_HERE = Path(__file__).parent


class FailureNote(Frozen):
    """A test failure: the exception, and what pytest prints of the test itself."""

    error: str
    message: str
    output: str


class TestRun(Frozen):
    """The result of one test run.

    ``covered``: by path, lines and how many tests ran them. ``broken``: files that were not collected, and why.
    """

    __test__ = False  # no test class for pytest

    outcomes: dict[str, str] = Field(default_factory=dict)
    failures: dict[str, FailureNote] = Field(default_factory=dict)
    broken: dict[str, str] = Field(default_factory=dict)
    covered: dict[str, dict[int, int]] = Field(default_factory=dict)
    timed_out: bool = False
    crashed: str = ""
    """Why there is no result; empty when there is one."""
    seconds: float = 0.0

    @property
    def passed(self) -> frozenset[str]:
        """The tests that passed."""
        return frozenset(name for name, outcome in self.outcomes.items() if outcome == "passed")


class TreeSandbox:
    """Runs tests and programs on trees with one environment. ``paths``: import roots in a tree.

    ``timeout`` is in seconds of wall time, for each run.
    """

    def __init__(self, environment: Path, paths: Sequence[str], timeout: float) -> None:
        self._environment = environment
        self._paths = tuple(paths)
        self._timeout = timeout

    def run_tests(
        self, tree: SourceTree, arguments: Sequence[str], *, covered: bool = False, hash_seed: int = 0
    ) -> TestRun:
        """Run the tests of a tree once."""
        words = ["python", "-m", "pytest", "-p", "openhands_rl_reporter", *PYTEST, "-q", *arguments]
        variables = {"OPENHANDS_RL_REPORT": "/tmp/out/report.json", "PYTHONHASHSEED": str(hash_seed)}
        if covered:
            variables["OPENHANDS_RL_COVERED"] = "1"
        with scratch_folder("tasks") as folder:
            started = time.monotonic()
            printed, timed_out = self._run(folder, tree, words, variables)
            seconds = time.monotonic() - started
            if timed_out:
                return TestRun(timed_out=True, seconds=seconds)
            try:
                report = _left(folder, "report.json")
                return TestRun.model_validate_json(report).model_copy(update={"seconds": seconds})
            except (OSError, ValidationError):
                last = next((line for line in reversed(printed.splitlines()) if line.strip()), "nothing was printed")
                return TestRun(crashed=last.strip()[:300], seconds=seconds)

    def run_program(self, tree: SourceTree, program: Path, given: JsonValue, *, isolated: bool = False) -> JsonValue:
        """What ``program`` (a file of this package) wrote as JSON: it is called with the paths of ``given`` as JSON and
        of its result. ``isolated``: nothing of the tree (a ``random.py``, a ``sitecustomize.py``) is imported unless
        the program does so. ``None`` when it ran too long or wrote none.
        """
        with scratch_folder("tasks") as folder:
            (folder / "out").mkdir()
            (folder / "out" / "program.py").write_bytes(program.read_bytes())
            (folder / "out" / "given.json").write_text(json.dumps(given), encoding="utf-8")
            command = ["python3", "/tmp/out/program.py", "/tmp/out/given.json", "/tmp/out/result.json"]
            variables = {"PYTHONHASHSEED": "0", **({"PYTHONPATH": ""} if isolated else {})}
            _, timed_out = self._run(folder, tree, command, variables)
            try:
                return None if timed_out else json.loads(_left(folder, "result.json"))
            except (OSError, ValueError, RecursionError):
                return None

    def _run(self, folder: Path, tree: SourceTree, words: list[str], variables: Mapping[str, str]) -> tuple[str, bool]:
        """The output, and whether it timed out."""
        work, out, tools = folder / "work", folder / "out", folder / "tools"
        tree.write(work)
        out.mkdir(exist_ok=True)
        tools.mkdir()
        shutil.copy(_HERE / "reporter.py", tools / "openhands_rl_reporter.py")
        python = self._environment / "bin" / "python3"
        prefixes = {str(self._environment): OF_A_PREFIX, str(python.resolve().parent.parent): OF_A_PREFIX}
        mounts = [
            *("--dir", "/tmp/home", *prefix_mounts(prefixes), "--bind", str(work), INSIDE),
            *("--bind", str(out), "/tmp/out", "--ro-bind", str(tools), "/tmp/tools"),
        ]
        limited = bounded(_LIMITS.counted(INSIDE, "/tmp/out"), str(python), words)
        command = sandboxed(limited, mounts, variables=self._variables(variables), folder=INSIDE)
        with open(folder / "printed", "wb") as printed:
            try:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=self._timeout,
                    check=False,
                )
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
        with open(folder / "printed", "rb") as written:
            written.seek(max(0, (folder / "printed").stat().st_size - 65536))
            return written.read().decode("utf-8", "replace"), timed_out

    def _variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{self._environment}/bin:/usr/bin:/bin",
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": ":".join([*(f"{INSIDE}/{path}" for path in self._paths), INSIDE, "/tmp/tools"]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
            **variables,
        }


def _left(folder: Path, name: str) -> bytes:
    """What tests left for the host, who follows no link of theirs and waits at no pipe. Raises ``OSError``."""
    return read_left(folder / "out", name, _LONGEST_REPORT)


@dataclass(frozen=True)
class PreparedPackage:
    """``tests`` are those that passed in each of the runs on ``tree`` and can be read off a log; ``flickering`` ones
    passed in some.
    """

    package: Package
    plan: TaskPlan
    origin: SourceOrigin
    tree: SourceTree
    layout: PackageLayout
    sandbox: TreeSandbox
    requirements: tuple[str, ...]
    first_run: TestRun
    tests: frozenset[str]
    flickering: frozenset[str] = frozenset()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Pytest's arguments."""
        return self.package.tests or self.layout.arguments

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders that are imported from."""
        return self.layout.paths

    @property
    def test_command(self) -> str:
        """The command of the row, run at the root of the repository."""
        words = ["python", "-m", "pytest", "-rA", *PYTEST, *self.arguments]
        before = f"PYTHONPATH={shlex.quote(':'.join(self.paths))} " if self.paths else ""
        return before + shlex.join(words)

    @property
    def install(self) -> tuple[str, ...]:
        """The command that makes the repository importable from anywhere; it needs no network."""
        folders = "\\n".join(f"/testbed/{path}" for path in self.paths) or "/testbed"
        target = "sysconfig.get_path('purelib') + '/testbed.pth'"
        return (f"python -c \"import sysconfig; open({target}, 'w').write('{folders}\\n')\"",)


def prepare_package(package: Package, plan: TaskPlan, cache: Path) -> PreparedPackage:
    """Fetch a package and run its tests twice. Raises ``ConfigError`` or ``InfrastructureError``."""
    origin, tree = fetch(package, cache)
    return prepare_tree(package, plan, origin, tree, cache)


def prepare_tree(
    package: Package, plan: TaskPlan, origin: SourceOrigin, tree: SourceTree, cache: Path
) -> PreparedPackage:
    """A prepared package of existing files. Raises as ``prepare_package`` does."""
    found = layout_of(tree)
    arguments = package.tests or found.arguments
    if not arguments:
        raise ConfigError(f"{package.label}: no tests found in it; name them (--tests)")
    if not found.code:
        raise ConfigError(f"{package.label}: no Python code found in it beside the tests")
    requirements = tuple(dict.fromkeys([*plan.requirements, *found.requirements]))
    environment = make_environment(plan.python, requirements, cache)
    sandbox = TreeSandbox(environment, found.paths, plan.timeout)
    first = sandbox.run_tests(tree, arguments, covered=True)
    _refuse_useless(package, first, plan.timeout)
    second = sandbox.run_tests(tree, arguments, hash_seed=1)
    tests = frozenset(test for test in first.passed & second.passed if _usable(test))
    if len(tests) < 2:
        raise ConfigError(f"{package.label}: fewer than two tests pass twice in a row; nothing can be measured by them")
    changing = first.passed ^ second.passed
    return PreparedPackage(package, plan, origin, tree, found, sandbox, requirements, first, tests, changing)


def _refuse_useless(package: Package, run: TestRun, timeout: float) -> None:
    if run.timed_out:
        raise ConfigError(f"{package.label}: its tests take more than {timeout:g} s; run fewer of them (--tests)")
    if run.crashed:
        raise ConfigError(f"{package.label}: its tests do not run: {run.crashed}")
    if not run.passed:
        files = [f"{file} ({why:.200})" if why else file for file, why in run.broken.items()]
        not_read = f"; not even collected: {', '.join(files[:3])}" if files else ""
        raise ConfigError(f"{package.label}: no test passes, are requirements missing (--with)?{not_read}")


def _usable(test: str) -> bool:
    """Whether a test's name is read off a log, passed or failed, as it is."""
    lines = ((f"PASSED {test}", "PASSED"), (f"FAILED {test} - assert [1] == [2] - x", "FAILED"))
    read = all(parse_pytest(line) == {test: status} for line, status in lines)
    return read and file_of(test).endswith(".py")
