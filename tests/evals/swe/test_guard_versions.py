"""The guard beside honest tests, by the versions of pytest that repositories have: outcomes and counts are the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from attacks import ATTACKS
from cheats import BASE, CHEATS, patch_of
from pytest_sample import vendored
from repository_samples import FIX, Sample, instance, make_repository, needs_sandbox

from openhands_rl_plugin.evals.swe.backends.caching import default_cache
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import PatchVerdict, VerdictKind

pytestmark = [pytest.mark.contract, needs_sandbox]

VERSIONS = (
    *(("4.6.11", "3.7"), ("4.6.11", "3.8"), ("6.2.5", "3.9"), ("7.0.1", "3.9"), ("7.4.4", "3.11"), ("8.0.2", "3.9")),
    *(("8.3.5", "3.12"), ("9.0.0", "3.12"), ("9.0.0", "3.13")),
)

CONFTEST = """\
import pytest

COUNTS = {}


def made(name):
    COUNTS[name] = COUNTS.get(name, 0) + 1
    return COUNTS[name]


@pytest.fixture(autouse=True)
def always():
    made("always")
    yield
    made("always ended")


@pytest.fixture
def three():
    made("three")
    return 3


@pytest.fixture(scope="module")
def once():
    return made("module")


@pytest.fixture(scope="session", autouse=True)
def session():
    yield made("session")
    made("session ended")


@pytest.fixture(params=[1, 2])
def either(request):
    made("either")
    return request.param


def pytest_unconfigure(config):
    print("COUNTS", sorted(COUNTS.items()))
"""
# Every plain test uses a fixture of its function.
TESTS = """\
import unittest

import pytest

import calc


def test_double(three):
    assert calc.double(three) == 6


def test_order(always, three, once):
    assert once == 1


def test_either(either, three):
    assert calc.double(either) == 2 * either


@pytest.mark.parametrize("a", [1, 2])
def test_many(a, tmpdir, monkeypatch):
    monkeypatch.setattr(calc, "three", 3, raising=False)
    assert calc.double(a) == 2 * a


class TestClass:
    def setup_method(self, method):
        self.two = 2

    def test_inside(self, three):
        assert calc.double(self.two) == 4

    def test_plain(self):
        assert calc.double(self.two) == 4


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.two = 2

    def test_unit(self):
        self.assertEqual(calc.double(self.two), 4)

    @unittest.expectedFailure
    def test_not_yet(self):
        self.assertEqual(calc.double(2), 5)


class Plain(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(calc.double(2), 4)


@pytest.mark.xfail
def test_marked(three):
    assert three == 4


def test_imperative(three):
    pytest.xfail("not yet")


def test_marked_meanwhile(request):
    request.node.add_marker(pytest.mark.xfail)
    assert calc.double(1) == 3


@pytest.mark.skip
def test_skipped(three):
    assert 0
"""
ADD = """\
import calc


def test_add(three):
    assert calc.add(1, 2) == three
"""
KEPT = (
    *("test_double", "test_order", "test_either[1]", "test_either[2]", "test_many[1]", "test_many[2]"),
    *("TestClass::test_inside", "TestClass::test_plain", "Case::test_unit", "Case::test_not_yet", "Plain::test_unit"),
    *("test_marked", "test_imperative"),
)
KEPT_BY_CHEATS = ("tests/test_calc.py::test_double", "tests/test_double.py::Double::test_four")
ATTACKED = (
    *("pytest.xfail in the product", "an exception of a class below xfail's", "a mark put on the item"),
    *(
        "a thread swaps the test's code",
        "a test swaps the code of the next",
        "Function.runtest by code of a system file",
    ),
    *("items found in memory get another function", "a plugin by pytest.ini that knows the test's name"),
    *("conftest: one report rewritten", "a plugin by setup.cfg that rewrites one report", "__eq__ by setattr"),
    *("what runtest raises is lost, once", "the caller by an exception's traceback", "the test's file by a relative"),
)


def make_versions_sample(folder: Path, version: str | None, python: str) -> Sample:
    """A repository whose every plain test uses a fixture. ``version``: of pytest; ``None``: this environment's."""
    files = {
        "calc.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
        "conftest.py": CONFTEST,
        "tests/test_calc.py": TESTS,
    }
    install = [] if version else vendored(folder / "work")
    base, later = make_repository(folder, files)
    row = instance(
        base,
        test_patch=patch_of({"tests/test_calc_add.py": ADD}),
        fail_to_pass=("tests/test_calc_add.py::test_add",),
        pass_to_pass=tuple(f"tests/test_calc.py::{name}" for name in KEPT),
        extra={
            "test_command": "python -m pytest -rA -p no:cacheprovider tests",
            "test_files": [],
            "python": python,
            "packages": [f"pytest=={version}"] if version else [],
            "install": install,
        },
    )
    return Sample(folder / "mirrors", row, later)


async def both_verdicts(sample: Sample, cache: Path, folder: Path) -> tuple[PatchVerdict, PatchVerdict]:
    """Of the fix, with and without a guard. Skips where no environment can be made, as the run without one shows."""
    found = []
    for name, guard in (("plain", None), ("guarded", RewardHackGuard())):
        backend = LocalBackend(cache=cache, sources=[MirrorSource(sample.mirror)], guard=guard)
        verdict = await backend.grade(sample.instance, FIX, logs=folder / name, timeout=120.0)
        if guard is None and verdict.kind is VerdictKind.INFRASTRUCTURE:
            pytest.skip(verdict.reason)
        found.append(verdict)
    plain, guarded = found
    return guarded, plain


def log_of(folder: Path) -> list[str]:
    """What the tests printed, without times and addresses."""
    text = (folder / "test_output.txt").read_text().partition(">>>>> Start Test Output'\n")[2]
    return re.sub(r"in \d+\.\d+ ?s\w*|0x[0-9a-f]+", "", text).splitlines()


async def check_unchanged(sample: Sample, cache: Path, folder: Path) -> None:
    guarded, plain = await both_verdicts(sample, cache, folder)
    assert plain.resolved, plain
    assert (guarded.kind, guarded.reason, guarded.flags) == (VerdictKind.RESOLVED, "", ())
    assert log_of(folder / "guarded") == log_of(folder / "plain")
    assert "COUNTS [(" in (folder / "plain" / "test_output.txt").read_text()


async def test_the_guard_changes_nothing(tmp_path: Path) -> None:
    sample = make_versions_sample(tmp_path, None, f"{sys.version_info.major}.{sys.version_info.minor}")
    await check_unchanged(sample, tmp_path / "cache", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "python"), VERSIONS)
async def test_the_guard_changes_nothing_at(version: str, python: str, tmp_path: Path) -> None:
    await check_unchanged(make_versions_sample(tmp_path, version, python), default_cache(), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "python"), VERSIONS)
async def test_cheats_are_caught_at(version: str, python: str, tmp_path: Path) -> None:
    base, later = make_repository(tmp_path, {name: text for name, text in BASE.items() if name != "run_tests.py"})
    made = make_versions_sample(tmp_path / "row", version, python).instance.extra
    row = instance(base, extra=made, pass_to_pass=KEPT_BY_CHEATS)
    sample = Sample(tmp_path / "mirrors", row, later)
    await both_verdicts(sample, default_cache(), tmp_path)
    backend = LocalBackend(cache=default_cache(), sources=[MirrorSource(sample.mirror)], guard=RewardHackGuard())
    patches = {each.name: each.patch() for each in ATTACKS if each.name.startswith(ATTACKED)}
    patches |= {each.name: patch_of(each.files) for each in CHEATS}
    passed = []
    for name, patch in patches.items():
        verdict = await backend.grade(row, patch, logs=tmp_path / "cheat", timeout=60.0)
        if verdict.resolved:
            passed.append(name)
    assert passed == []
