"""Every bug parses, means something else, and is taken back by its own patch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from broken_repository import commit_of
from needs import needs_bubblewrap

from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.evals.tasks.bugs import KINDS, PythonSource, bugs_of, patch_of
from openhands_rl_plugin.evals.tasks.make import failures, leaks
from openhands_rl_plugin.evals.tasks.source import commit_files

SHOP = '''class Basket(dict):
    def put(self, name, count=1, strict=False):
        """Put things in — and how many."""
        if not name:
            raise ValueError("no name")
        if count > self.limit and strict:
            return False
        else:
            self[name] = count
        self.note(name, count)
        return name.strip() if total(count) else None


def total(counts, rate=2):
    # What costs nothing is left out.
    for at in range(rate, len(counts)):
        if counts[at] in counts:
            counts[at] += min(counts[at], rate * counts[at - 1])
    return counts


def shorten(text, width=10, mark='...', keep=True):
    """Shorten a text."""
    words = text.split()
    if not words:
        return ''
    result = words[0]
    for index in range(1, len(words)):
        if len(result) + len(words[index]) < width and keep:
            result = ' '.join([result, words[index]])
    rest = max(width, len(mark))
    return result[:rest - len(mark)] + mark
'''


BUGS = list(bugs_of("shop.py", SHOP))


def test_every_kind_is_found_and_each_bug_parses_and_differs() -> None:
    assert {bug.kind for bug in BUGS} == set(KINDS)
    for bug in BUGS:
        changed = PythonSource(SHOP).apply(bug.edits)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SHOP))
        assert "# What costs nothing is left out." in changed


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        ("if a < b: return 1", "comparison", {"if a <= b: return 1"}),
        ("return a and f(b)", "missing case", {"return a", "return f(b)"}),
        ("return (a + 1) * b", "operator", {"return (a - 1) * b", "return (a + 1) + b"}),
        ("return a[:len(b)]", "off by one", {"return a[:len(b) - 1]", "return a[:len(b) + 1]"}),
        ("return a.lstrip()", "wrong method", {"return a.rstrip()", "return a"}),
    ],
)
def test_only_the_place_of_the_bug_changes(code: str, kind: str, expected: set[str]) -> None:
    text = f"def f(a, b):  # é\n    {code}\n"
    bugs = [bug for bug in bugs_of("a.py", text) if bug.kind == kind]
    assert {PythonSource(text).apply(bug.edits).splitlines()[1].strip() for bug in bugs} == expected


@needs_bubblewrap
@pytest.mark.parametrize("end", ["", "x = 1", "\x0c\u2028x = 1\n"])
def test_a_patch_takes_the_bug_back_and_commits_depend_on_the_files_alone(end: str, tmp_path: Path) -> None:
    right = SHOP + end.replace("\x0c", "# \x0b")
    for at, bug in enumerate(BUGS[:: len(BUGS) // 3]):
        broken = PythonSource(right).apply(bug.edits)
        patch = patch_of("shop.py", broken, right) + patch_of("test_shop.py", None, "assert shop")
        work = tmp_path / str(at)
        write_file(work / "shop.py", right, parents=True)
        write_file(work / "test_shop.py", "assert shop")
        made = commit_files(tmp_path / f"{at}.git", work, "start", patch=patch)
        assert made == commit_of({"shop.py": broken}, who="swe-local")


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\r\n", "\ufeffx = 1\n", "\0"])
def test_a_file_that_cannot_be_edited_has_no_bugs(text: str) -> None:
    assert not list(bugs_of("a.py", text))


def test_a_leak_is_a_long_changed_line() -> None:
    patch = patch_of("x.py", "total = total + 1\nunchanged_line()\n", "total = total - 1\nunchanged_line()\n")
    assert leaks("see: total = total - 1", patch) and leaks("see: total = total + 1", patch)
    assert not leaks("see: unchanged_line() and a/x.py", patch)


LOG = """=================================== FAILURES ===================================
______________________________ TestA.test_b[1-x] _______________________________

test_a.py:3:
_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _

E       ZeroDivisionError: division by zero

a.py:2: ZeroDivisionError
__________________________________ test_short __________________________________
>       assert 0
=========================== short test summary info ============================
FAILED test_a.py::TestA::test_b[1-x] - ZeroDivisionError
"""


def test_what_a_failing_test_prints_is_read_off_the_log_without_the_code_that_it_calls() -> None:
    found = failures(LOG)
    assert found["test_short"] == ">       assert 0"
    assert found["TestA.test_b[1-x]"].endswith("test_a.py:3:\nE       ZeroDivisionError: division by zero")
    assert failures("1 passed") == {}
