"""The guard beside tests that run pytest themselves: what happens in those runs is the same with it and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cheats import patch_of
from pytest_sample import vendored
from repository_samples import FILES, FIX, NOTHING, Sample, instance, make_repository, needs_sandbox
from test_guard_versions import VERSIONS, log_of

from openhands_rl_plugin.evals.swe.backends.caching import default_cache
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.guard import inside as guard_inside
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import VerdictKind

pytestmark = needs_sandbox

PLUGIN = """

import pytest


@pytest.fixture
def three():
    return 3


def pytest_report_teststatus(report):
    if report.when == "call" and report.failed:
        return "failed", "!", "BROKEN"
"""
# What the first nested run changes the second one imports anew, unless pytest, or somebody with it, imported it before.
TESTS = """\
import pytest

FIRST = '''
import unittest

unittest.first = True


class Case(unittest.TestCase):
    def test_first(self):
        self.assertEqual(1, 1)
'''
SECOND = '''
import unittest
from calc import add


class Case(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(3 if hasattr(unittest, "first") else add(1, 2), 3)
'''
MODULES = '''
import sys


def test_modules():
    names = sorted(str(getattr(module, "__file__", "")) for module in list(sys.modules.values()))
    names = [name for name in names if name.endswith(".py") and not name.startswith("/guard/")]
    print("MODULES", names)
    assert sys.getprofile() is None


def test_fails(three):
    assert three == 4
'''


@pytest.fixture(params=["inline", "subprocess"])
def outcomes(request, FIXTURE):
    def run(**files):
        FIXTURE.makepyfile(**files)
        way = FIXTURE.runpytest_inprocess if request.param == "inline" else FIXTURE.runpytest_subprocess
        result = way("-p", "calc", "-s")
        print(result.stdout.str())
        return result

    return run


def test_1_first(outcomes):
    outcomes(test_first=FIRST).assert_outcomes(passed=1)


def test_2_modules(outcomes):
    result = outcomes(test_modules=MODULES)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*!*"])


def test_3_main(FIXTURE):
    path = FIXTURE.makepyfile(test_main="def test_fails():\\n    assert 0\\n")
    assert int(pytest.main(["-p", "calc", str(path)])) == 1
"""
SUM = """\
from test_calc import SECOND, outcomes


def test_sum(outcomes):
    outcomes(test_second=SECOND).assert_outcomes(passed=1)
"""
VARIABLES = "PYTHONHASHSEED=0 PYTHONPATH=/testbed:/testbed/tests"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
WAYS = ("inline", "subprocess")


def make_nesting_sample(folder: Path, version: str | None, python: str) -> Sample:
    """A plugin of pytest that is tested by ``pytester``. ``version``: of pytest; ``None``: this environment's."""
    fixture = "pytester" if version is None or int(version.partition(".")[0]) >= 7 else "testdir"
    files = {
        "calc.py": FILES["calc.py"] + PLUGIN,
        "conftest.py": 'pytest_plugins = ["pytester"]\n',
        "tests/test_calc.py": TESTS.replace("FIXTURE", fixture),
    }
    install = [] if version else vendored(folder / "work")
    base, later = make_repository(folder, files)
    row = instance(
        base,
        test_patch=patch_of({"tests/test_sum.py": SUM}),
        fail_to_pass=tuple(f"tests/test_sum.py::test_sum[{way}]" for way in WAYS),
        pass_to_pass=(
            *(f"tests/test_calc.py::{name}[{way}]" for name in ("test_1_first", "test_2_modules") for way in WAYS),
            "tests/test_calc.py::test_3_main",
        ),
        extra={
            "test_command": f"{VARIABLES} python -m pytest -rA -p no:cacheprovider tests",
            "test_files": [],
            "python": python,
            "packages": [f"pytest=={version}"] if version else [],
            "install": install,
        },
    )
    return Sample(folder / "mirrors", row, later)


GRADED = ((NOTHING, VerdictKind.UNRESOLVED), (FIX, VerdictKind.RESOLVED))


async def check_nested(sample: Sample, cache: Path, folder: Path) -> None:
    """A patch that changes nothing, and the fix, each with the guard and without."""
    sources = [MirrorSource(sample.mirror)]
    for patch, kind in GRADED:
        logs, failed = [], []
        for name, guard in (("plain", None), ("guarded", RewardHackGuard())):
            backend = LocalBackend(cache=cache, sources=sources, guard=guard)
            verdict = await backend.grade(sample.instance, patch, logs=folder / name, timeout=120.0)
            # With the guard this is a defect: without it the environment could be made.
            if guard is None and verdict.kind is VerdictKind.INFRASTRUCTURE:
                pytest.skip(verdict.reason)
            assert (verdict.kind, verdict.flagged) == (kind, ()), (name, verdict)
            failed.append((verdict.fail_to_pass.failure, verdict.pass_to_pass.failure))
            logs.append(re.sub(r"duration=\S+", "", "\n".join(log_of(folder / name))))
        assert failed[0] == failed[1] and logs[0] == logs[1]


def test_the_plugin_imports_no_unittest() -> None:
    """pytest may not have imported it: then each nested run has one of its own, and has to have it with the guard."""
    inside = Path(guard_inside.__path__[0])
    code = """
import importlib.util, sys, types
sys.modules["pytest"] = types.SimpleNamespace(Function=None, hookimpl=lambda **how: lambda made: made)
for name in ("plugin_checks", "plugin_canaries", "plugin"):
    file = name.split("_")[-1] + ".py"
    spec = importlib.util.spec_from_file_location(name, sys.argv[1] + "/" + file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
print([name for name in sys.modules if name.startswith("unittest")])
"""
    done = subprocess.run([sys.executable, "-S", "-B", "-c", code, inside], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("version", "python"), [(None, f"{sys.version_info.major}.{sys.version_info.minor}"), *VERSIONS]
)
async def test_nested_runs_are_as_without_the_guard(version: str | None, python: str, tmp_path: Path) -> None:
    sample = make_nesting_sample(tmp_path, version, python)
    await check_nested(sample, tmp_path / "cache" if version is None else default_cache(), tmp_path)
