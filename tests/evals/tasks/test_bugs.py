"""Every bug parses, means something else, and is taken back by its own patch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from openhands_rl_plugin.evals.tasks.bugs import KINDS, PythonSource, bugs_of
from openhands_rl_plugin.evals.tasks.suite import buggy
from openhands_rl_plugin.evals.tasks.trees import GitRepository, SourceTree

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
        ("if a not in b: return 1", "inverted condition", {"if a in b: return 1"}),
        ("return a and f(b)", "missing case", {"return a", "return f(b)"}),
        ("return (a + 1) * b", "operator", {"return (a - 1) * b", "return (a + 1) + b"}),
        ("return a[:len(b)]", "off by one", {"return a[:len(b) - 1]", "return a[:len(b) + 1]"}),
        ("return f(a, b.c)", "swapped arguments", {"return f(b.c, a)"}),
        ("return a.lstrip()", "wrong method", {"return a.rstrip()", "return a"}),
    ],
)
def test_only_the_place_of_the_bug_changes(code: str, kind: str, expected: set[str]) -> None:
    text = f"def f(a, b):  # é\n    {code}\n"
    bugs = [bug for bug in bugs_of("a.py", text) if bug.kind == kind]
    assert {PythonSource(text).apply(bug.edits).splitlines()[1].strip() for bug in bugs} == expected


def test_the_patch_takes_the_bug_back_and_commits_depend_on_the_files_alone(tmp_path: Path) -> None:
    whole = SourceTree({}).changed({"shop.py": SHOP})
    repository = GitRepository.create(tmp_path / "task.git")
    solved = repository.commit(whole, "shop", "solved")
    assert GitRepository.create(tmp_path / "b").commit(whole, "shop", "main") == solved
    assert GitRepository(tmp_path / "task.git").tree(solved) == whole
    for bug in BUGS[:: len(BUGS) // 4]:
        broken = repository.commit(buggy(whole, bug), "shop", "broken")
        patch = repository.diff(broken, solved)
        assert repository.without(solved, (patch,), "shop", "again") == broken


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\r\n", "\ufeffx = 1\n", "\0"])
def test_a_file_that_cannot_be_edited_has_no_bugs(text: str) -> None:
    assert not list(bugs_of("a.py", text))
