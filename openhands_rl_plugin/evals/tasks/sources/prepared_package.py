"""A package prepared for bugs: its files, its environment, and its test results without a bug."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.tasks.hidden_tests import file_of
from openhands_rl_plugin.evals.tasks.sandbox import PYTEST, TestRun, TreeSandbox
from openhands_rl_plugin.evals.tasks.sources.download import SourceOrigin, fetch, fetch_release
from openhands_rl_plugin.evals.tasks.sources.package_layout import PackageLayout, layout_of
from openhands_rl_plugin.evals.tasks.sources.packages import Package, TaskPlan
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree
from openhands_rl_plugin.evals.tasks.sources.virtualenv import make_environment

_READABLE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class PreparedPackage:
    """``tests`` are those that passed in each of the runs on ``tree`` and can be read off a log; ``flickering`` ones
    passed in some.
    """

    package: Package
    plan: TaskPlan
    origin: SourceOrigin
    tree: SourceTree
    older: SourceTree | None
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
        return self.package.paths or self.layout.paths

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
    older = None
    if package.previous is not None:
        older = fetch_release(package.name, package.previous, cache)[1]
    return prepare_tree(package, plan, origin, tree, older, cache)


def prepare_tree(
    package: Package, plan: TaskPlan, origin: SourceOrigin, tree: SourceTree, older: SourceTree | None, cache: Path
) -> PreparedPackage:
    """A prepared package of existing files. Raises as ``prepare_package`` does."""
    found = layout_of(tree)
    arguments = package.tests or found.arguments
    if not arguments:
        raise ConfigError(
            f"{package.label}: no tests found in it; name them (--tests of `improve`, tests = [...] in a plan)"
        )
    if not found.code:
        raise ConfigError(f"{package.label}: no Python code found in it beside the tests")
    requirements = tuple(dict.fromkeys([*plan.requirements, *package.requirements, *found.requirements]))
    environment = make_environment(plan.python, requirements, cache)
    sandbox = TreeSandbox(environment, package.paths or found.paths, plan.timeout)
    first = sandbox.run_tests(tree, arguments, covered=True)
    _refuse_useless(package, first, plan.timeout)
    second = sandbox.run_tests(tree, arguments, hash_seed=1)
    tests = frozenset(test for test in first.passed & second.passed if _usable(test, package.avoid))
    if len(tests) < 2:
        raise ConfigError(f"{package.label}: fewer than two tests pass twice in a row; nothing can be measured by them")
    changing = first.passed ^ second.passed
    return PreparedPackage(package, plan, origin, tree, older, found, sandbox, requirements, first, tests, changing)


def _refuse_useless(package: Package, run: TestRun, timeout: float) -> None:
    if run.timed_out:
        raise ConfigError(
            f"{package.label}: its tests take more than {timeout:g} s; run fewer of them (--tests of `improve`, "
            "tests = [...] in a plan)"
        )
    if run.crashed:
        raise ConfigError(f"{package.label}: its tests do not run: {run.crashed}")
    if not run.passed:
        files = [f"{file} ({why:.200})" if why else file for file, why in run.broken.items()]
        not_read = f"; not even collected: {', '.join(files[:3])}" if files else ""
        raise ConfigError(
            f"{package.label}: no test passes, are requirements missing (--with of `improve`, requirements = [...] in "
            f"a plan)?{not_read}"
        )


def _usable(test: str, avoid: Sequence[str]) -> bool:
    """Whether a test's name survives in a log, where names end at the first blank, and is not in ``avoid``."""
    return bool(_READABLE.fullmatch(test)) and file_of(test).endswith(".py") and not any(each in test for each in avoid)
