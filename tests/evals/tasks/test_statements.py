"""Reports on failing tests, and test files without the tests that fail."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from openhands_rl_plugin.evals.tasks.hidden_tests import without_tests
from openhands_rl_plugin.evals.tasks.sandbox import FailureNote
from openhands_rl_plugin.evals.tasks.sources.trees import PLAIN, SourceTree, TreeFile
from openhands_rl_plugin.evals.tasks.statements.bug_report import leaks, statement_of
from openhands_rl_plugin.evals.tasks.statements.examples import FailureExample, example_of

TESTS = '''import math as m
import unittest
from textwrap import dedent, fill

import pytest

LIMIT = 3


def helper(value):
    return value * LIMIT


@pytest.fixture
def shop():
    return {}


@pytest.mark.parametrize("given", [1, 4])
def test_equal(given):
    """The docstring is not shown."""
    unused = object()
    root = m.sqrt(given)
    assert root >= 0
    assert helper(root) == 7


def test_raises():
    with pytest.raises(ZeroDivisionError):
        m.sqrt(1)


def test_fixture(shop):
    assert shop["x"] == 1


class TestText(unittest.TestCase):
    kind = str

    def setUp(self):
        self.made = 1

    def test_unittest(self):
        text = dedent("  a")
        self.assertEqual("b", text)

    def test_class_attribute(self):
        self.assertTrue(self.kind(1) == "2")

    def test_set_up(self):
        self.assertEqual(self.made, 2)
'''


def note(line: str, **values: str) -> FailureNote:
    number = next(at for at, text in enumerate(TESTS.splitlines(), 1) if line in text)
    return FailureNote(error="AssertionError", message="no", file="tests/test_a.py", line=number, values=values)


def example(test: str, line: str, **values: str) -> FailureExample:
    found = example_of(TESTS, f"tests/test_a.py::{test}", note(line, **values))
    assert found is not None
    return found


def ran(script: str, folder: Path) -> dict[str, object]:
    (folder / "script.py").write_text(script)
    return runpy.run_path(str(folder / "script.py"))


def test_an_example_has_what_it_needs_and_no_more(tmp_path: Path) -> None:
    found = example("test_equal[4]", "helper(root) == 7", given="4")
    assert found.code == (
        "import math as m\nLIMIT = 3\ndef helper(value):\n    return value * LIMIT\ngiven = 4\n"
        "root = m.sqrt(given)\nhelper(root)"
    )
    names = ran(found.script, tmp_path)
    assert (names["ACTUAL"], names["EXPECTED"], names["HOLDS"]) == (6.0, 7, False)


def test_an_exception_that_does_not_come(tmp_path: Path) -> None:
    found = example("test_raises", "m.sqrt(1)")
    assert (found.code, found.claim.kind, found.claim.expected) == (
        "import math as m\nm.sqrt(1)",
        "raises",
        "ZeroDivisionError",
    )
    assert ran(found.script, tmp_path)["HOLDS"] is True


def test_a_method_of_unittest_becomes_plain_code() -> None:
    found = example("TestText::test_unittest", 'assertEqual("b"')
    assert (found.code, found.claim.expected) == ('from textwrap import dedent\ntext = dedent("  a")\ntext', '"b"')


def test_a_class_that_the_test_case_names() -> None:
    found = example("TestText::test_class_attribute", "self.kind(1)", **{"self.kind": "builtins:str"})
    assert found.code == 'from builtins import str as kind\n(kind(1) == "2")'


@pytest.mark.parametrize(
    ("test", "line"), [("test_fixture", 'shop["x"] == 1'), ("TestText::test_set_up", "assertEqual(self.made, 2)")]
)
def test_what_needs_a_fixture_is_no_example(test: str, line: str) -> None:
    assert example_of(TESTS, f"tests/test_a.py::{test}", note(line)) is None


def test_a_report_tells_what_was_seen_in_both_worlds() -> None:
    failures = {
        "tests/test_a.py::test_equal[4]": note("helper(root) == 7", given="4"),
        "tests/test_a.py::test_fixture": note('shop["x"] == 1'),
    }

    def run(script: str, with_bug: bool) -> dict[str, str]:
        return {"ACTUAL": "6.0" if with_bug else "7", "EXPECTED": "7", "HOLDS": str(not with_bug)}

    report = statement_of("shop 1.0", "3.12", {"tests/test_a.py": TESTS}.get, failures, run) or ""
    assert report.startswith("`helper()` gives a wrong result\n\nI am using shop 1.0 with Python 3.12.\n")
    assert "Expected result:\n\n```\n7\n```\n\nActual result:\n\n```\n6.0\n```" in report
    assert report.endswith("- fixture\n")


def test_an_example_that_does_not_fail_outside_the_test_is_not_shown() -> None:
    failures = {"tests/test_a.py::test_raises": note("m.sqrt(1)")}
    plain = statement_of(
        "shop 1.0", "3.12", {"tests/test_a.py": TESTS}.get, failures, lambda script, bug: {"HOLDS": "True"}
    )
    assert plain is not None and plain.startswith("Wrong behaviour: raises\n")
    assert "The last step fails with `AssertionError: no`." in plain


@pytest.mark.parametrize("value", ["<object object at 0x7f0011223344>", "/tmp/pytest-of-root/x"])
def test_values_that_differ_from_run_to_run_are_not_shown(value: str) -> None:
    failures = {"tests/test_a.py::test_equal[4]": note("helper(root) == 7", given="4")}

    def run(script: str, with_bug: bool) -> dict[str, str]:
        return {"ACTUAL": repr(value), "EXPECTED": "7", "HOLDS": str(not with_bug)}

    report = statement_of("shop 1.0", "3.12", {"tests/test_a.py": TESTS}.get, failures, run)
    assert report is not None and value not in report


def test_a_leak_is_a_long_changed_line() -> None:
    patch = (
        "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-    total = total + 1\n+    total = total - 1\n unchanged_line()\n"
    )
    assert leaks("see: total = total - 1", patch) and leaks("see: total = total + 1", patch)
    assert not leaks("see: unchanged_line() and a/x.py", patch)


def without(*tests: str, text: str = TESTS) -> str | None:
    tree = SourceTree({"tests/test_a.py": TreeFile(PLAIN, text.encode())})
    return without_tests(tree, [f"tests/test_a.py::{test}" for test in tests])["tests/test_a.py"]


def test_failing_tests_are_taken_out() -> None:
    left = without("test_equal[1]", "test_equal[4]", "TestText::test_set_up") or ""
    assert "test_equal" not in left and "parametrize" not in left and "test_set_up" not in left
    assert "def test_fixture(shop):" in left and "def test_unittest(self):" in left
    assert {node.name for node in ast.parse(left).body if isinstance(node, ast.FunctionDef)} == {
        "helper",
        "shop",
        "test_raises",
        "test_fixture",
    }


def test_a_class_without_tests_goes_as_well() -> None:
    text = "def test_a(): pass\n\n\nclass TestB:\n    '''All of b.'''\n\n    def test_b(self):\n        pass\n"
    assert without("TestB::test_b", text=text) == "def test_a(): pass\n"


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("test_a", "def test_a():\n    pass\n"),  # nothing is left
        ("test_made", "test_made = make()\ndef test_b():\n    pass\n"),  # not written out
        ("test_a", "def test_a(:\n"),
    ],
)
def test_a_file_goes_as_a_whole_when_it_must(test: str, text: str) -> None:
    assert without(test, text=text) is None
