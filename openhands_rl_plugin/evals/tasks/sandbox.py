"""Runs tests and programs in bubblewrap: without network, with write access to their own copy only."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, JsonValue, ValidationError

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import empty_root, isolate
from openhands_rl_plugin.environments.workspace.copies import scratch_folder
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.environments.workspace.inside import Bound, bounded
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits
from openhands_rl_plugin.environments.workspace.visible import (
    OF_A_PREFIX,
    hidden_package,
    prefix_mounts,
    system_mounts,
)
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree

INSIDE = "/tmp/testbed"
MEMORY_KIB = 4 * 1024**2
_TEMPORARY = 1024**3
_LIMITS = SandboxLimits()
_LONGEST_REPORT = 256 * 1024**2
PYTEST = ("-o", "addopts=", "-p", "no:cacheprovider")
_HERE = Path(__file__).parent
_RESTRICTED = f'ulimit -v {MEMORY_KIB} -f 1048576 -c 0; exec "$@"'


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
        with scratch_folder("openhands-rl-tasks-") as folder:
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

    def run_program(
        self, tree: SourceTree, program: Path, given: JsonValue, *, hash_seed: int = 0, isolated: bool = False
    ) -> JsonValue:
        """What ``program`` (a file of this package) wrote as JSON: it is called with the paths of ``given`` as JSON and
        of its result. ``isolated``: nothing of the tree (a ``random.py``, a ``sitecustomize.py``) is imported unless
        the program does so. ``None`` when it ran too long or wrote none.
        """
        with scratch_folder("openhands-rl-tasks-") as folder:
            (folder / "out").mkdir()
            (folder / "out" / "program.py").write_bytes(program.read_bytes())
            (folder / "out" / "given.json").write_text(json.dumps(given), encoding="utf-8")
            command = ["python3", "/tmp/out/program.py", "/tmp/out/given.json", "/tmp/out/result.json"]
            variables = {"PYTHONHASHSEED": str(hash_seed), **({"PYTHONPATH": ""} if isolated else {})}
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
        binds = ("--bind", str(work), INSIDE, "--bind", str(out), "/tmp/out", "--ro-bind", str(tools), "/tmp/tools")
        command = [*_isolated(self._environment), *binds, *self._variables(variables), "--chdir", INSIDE, "--"]
        bound = Bound(
            processes=_LIMITS.processes, memory=_LIMITS.memory, disk=_LIMITS.disk, folder=INSIDE, also="/tmp/out"
        )
        command += bounded(bound, f"{self._environment}/bin/python3", ["/bin/sh", "-c", _RESTRICTED, "sh", *words])
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

    def _variables(self, variables: Mapping[str, str]) -> list[str]:
        everything = {
            "PATH": f"{self._environment}/bin:/usr/bin:/bin",
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": ":".join([*(f"{INSIDE}/{path}" for path in self._paths), INSIDE, "/tmp/tools"]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
            **variables,
        }
        return ["--clearenv", *(part for name, value in everything.items() for part in ("--setenv", name, value))]


def _left(folder: Path, name: str) -> bytes:
    """What tests left for the host, who follows no link of theirs and waits at no pipe. Raises ``OSError``."""
    return Workspace(folder / "out").read(name, _LONGEST_REPORT)


def _isolated(environment: Path) -> list[str]:
    """``bwrap`` with the system's programs and the environment; ``/tmp`` alone can be written."""
    return [
        *isolate([*empty_root(), *system_mounts()], options=("--die-with-parent",), shared_memory=_TEMPORARY),
        *("--size", str(_TEMPORARY), "--tmpfs", "/tmp", "--dir", "/tmp/home"),
        *_environment_mounts(environment),
        *("--remount-ro", "/"),
    ]


@functools.cache
def _environment_mounts(environment: Path) -> tuple[str, ...]:
    real = str(environment.resolve())
    base = (environment / "bin" / "python3").resolve().parent.parent
    link = () if real == str(environment) else ("--symlink", real, str(environment))
    prefixes = {real: OF_A_PREFIX, str(base): OF_A_PREFIX}
    return (*prefix_mounts(prefixes, closed=False), *link, *hidden_package([*prefixes]))
