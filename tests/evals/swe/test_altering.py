"""Altered tests, run by pytest: those that expect something else fail, inverted ones pass, names and lines stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openhands_rl_plugin.evals.swe.guard import Altered, Mode, alter, alter_doctest, functions_of
from openhands_rl_plugin.evals.swe.recipes import parse_pytest

TESTS = '''\
import unittest
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal


class TestMore:
    value = 3

    def test_method(self):
        assert self.value in (3, 4) and [self.value] == [
            3,
        ], "a message"


class Case(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(
            {"a": [1, 2]}["a"],
            [1, 2],
        )

    def test_several(self):
        self.assertIn(1, [1, 2]); self.assertTrue(True)
        self.assertAlmostEqual(first=0.1 + 0.2, second=0.3)


def test_literals():
    three = int("3")
    assert three == 3
    assert "ab" == "a" "b"
    assert f"{three}" == f"{3}"
    assert three is not None or not three
    assert (1, -2) == (three - 2, -2) == (1, -2)


def test_text():
    expected = """two
lines"""
    text = "\\n".join(("two", "lines"))
    assert text == expected


@pytest.mark.parametrize(
    ("a", "expected"),
    [(1, 2), pytest.param(2, 4, id="two")],
)
def test_parametrized(a, expected):
    assert 2 * a == expected


def test_arrays():
    assert_array_equal(np.arange(3), np.array([0, 1, 2]))
    np.testing.assert_allclose(np.ones(2), 1.0)
    assert_allclose(actual=np.ones(2), desired=[1, 1])
    assert np.float64(2.5) == pytest.approx(2.5)


def test_nested():
    def inner():
        assert 1 + 1 == 2

    inner()


def test_raises():
    with pytest.raises(ZeroDivisionError, match="zero"):
        1 / 0
'''
NAMES = [name for name in functions_of(TESTS) if "test_" in name]
UNINVERTED = {"test_raises"}
"""Tests without an assertion whose denial says anything."""


EQUAL = """\
class Any:
    def __eq__(self, other):
        return True


def test_it():
    assert 1 + 1 == 2
    assert Any() == [3]
"""


def altered(text: str) -> dict[Mode, Altered]:
    names = [name for name in functions_of(text) if "test_" in name]
    return {mode: alter(text, dict.fromkeys(names, mode), "tag") for mode in Mode}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Of each file, how its tests end."""
    folder, found = tmp_path_factory.mktemp("altered"), dict[str, dict[str, str]]()
    more, equal = ({mode: made.text for mode, made in altered(text).items()} for text in (TESTS, EQUAL))
    for name, text in {"plain": TESTS, **more, **{f"equal_{mode}": equal[mode] for mode in Mode}}.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-q", "--tb=short", "."]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    for test, status in parse_pytest(ran.stdout).items():
        file, _, name = test.partition("::")
        found.setdefault(file.removesuffix(".py"), {})[name] = status
    return found


def test_altered_tests_fail_and_inverted_ones_pass(outcomes: dict[str, dict[str, str]]) -> None:
    plain = outcomes["test_plain"]
    assert len(plain) == 10 and {*plain.values()} == {"PASSED"}
    found = altered(TESTS)
    assert found[Mode.FAIL].functions == {*NAMES}
    assert found[Mode.INVERT].functions == {*NAMES} - UNINVERTED
    failing, inverted = (outcomes[f"test_{mode}"] for mode in (Mode.FAIL, Mode.INVERT))
    assert len(failing) == len(inverted) == len(plain)
    assert {*failing.values()} == {"FAILED"}
    assert [name for name, status in inverted.items() if status != "PASSED"] == []
    lines = {name: node.lineno for name, node in functions_of(TESTS).items()}
    for each in found.values():
        assert {name: functions_of(each.text)[name].lineno for name in lines} == lines


def test_what_equals_everything_fails_where_it_is_inverted(outcomes: dict[str, dict[str, str]]) -> None:
    """Beside an honest assertion, which is what fails where another value is expected."""
    ends = {mode: outcomes[f"test_equal_{mode}"] for mode in Mode}
    assert ends == {Mode.FAIL: {"test_it": "FAILED"}, Mode.INVERT: {"test_it": "FAILED"}}


def test_only_the_named_functions_are_altered() -> None:
    altered = alter(TESTS, {"TestMore::test_method": Mode.FAIL, "no_such": Mode.FAIL}, "tag")
    before, after = TESTS.split("\n"), altered.text.split("\n")
    assert [at for at, line in enumerate(before) if after[at] != line] == [10, 11]
    assert alter("print 'Python 2'", {"test_x": Mode.FAIL}, "tag") == ("print 'Python 2'", frozenset())


@pytest.mark.parametrize("name", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda file: file.name)
def test_files_of_tests_stay_python(name: Path) -> None:
    text = name.read_text()
    for mode in Mode:
        altered = alter(text, dict.fromkeys(functions_of(text), mode), "tag")
        assert functions_of(altered.text).keys() >= functions_of(text).keys()


def test_examples_in_texts_expect_something_else() -> None:
    text = "Adds.\n\n    >>> 1 + 1\n    2\n    >>> x = 1\n    >>> [\n    ...  2]\n    [2]\n\nEnd 2.\n"
    assert alter_doctest(text, "tag") == text.replace("    2\n", "    2tag\n").replace("    [2]\n", "    [2]tag\n")
