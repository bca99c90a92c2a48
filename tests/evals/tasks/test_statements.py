"""Statements that show no fix, and test files without the tests that fail."""

from __future__ import annotations

import ast

import pytest

from openhands_rl_plugin.evals.tasks.sandbox import without_tests
from openhands_rl_plugin.evals.tasks.suite import leaks
from openhands_rl_plugin.evals.tasks.trees import PLAIN, SourceTree, TreeFile

TESTS = """import unittest

import pytest


@pytest.fixture
def shop():
    return {}


@pytest.mark.parametrize("given", [1, 4])
def test_equal(given):
    assert given == 7


def test_fixture(shop):
    assert shop["x"] == 1


class TestText(unittest.TestCase):
    def test_unittest(self):
        self.assertEqual("b", "a")

    def test_set_up(self):
        self.assertEqual(self.made, 2)
"""


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
    functions = {node.name for node in ast.parse(left).body if isinstance(node, ast.FunctionDef)}
    assert functions == {"shop", "test_fixture"}


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
