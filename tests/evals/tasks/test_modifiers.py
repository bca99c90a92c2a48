"""Every bug parses, means something else, and is taken back by its own patch."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.evals.tasks.bugs import NAMES, Bug, Edit, PythonSource, bugs_of
from openhands_rl_plugin.evals.tasks.suite import REOPENED, buggy, candidates
from openhands_rl_plugin.evals.tasks.trees import PLAIN, GitRepository, SourceTree, TreeFile

SHOP = '''"""A shop that has something of everything."""

from collections import OrderedDict


class Basket(OrderedDict, object):
    """Things — and how many."""

    limit = 10

    def __len__(self):
        return sum(self.values())

    def put(self, name, count=1, strict=False):
        """Put things in."""
        if not name:
            raise ValueError("no name")
        if count > self.limit and strict:
            return False
        else:
            self.limit = self.limit - count
            self[name] = count
        self.note(name, count)
        return True

    def note(self, name, count):
        self.last, self.previous = name.strip(), count
        return count, name

    def price(self, prices, rate=2):
        total = 0
        # What costs nothing is left out.
        for name, count in self.items():
            try:
                each = prices[name]
            except (KeyError, TypeError):
                continue
            if each < 0 or each is None:
                break
            total += each * count
        total = total + total // 100 * rate
        return round(total, ndigits=1) if total > 1 else min(total, rate)


def words(text, first=1):
    found = sorted(text.lower().split(" "))
    for at in range(first, len(found)):
        if found[at] == found[at - 1]:
            found[at] = ""
    return found[first:]
'''


def tree_of(**files: str) -> SourceTree:
    return SourceTree({f"{name}.py": TreeFile(PLAIN, text.encode()) for name, text in files.items()})


BUGS = list(bugs_of("shop.py", SHOP))


def test_every_modifier_finds_something() -> None:
    assert {bug.modifier for bug in BUGS} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_bugs_parse_and_differ(name: str) -> None:
    for bug in (bug for bug in BUGS if bug.modifier == name):
        changed = PythonSource(SHOP).apply(bug.edits)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SHOP))
        assert "# What costs nothing is left out." in changed or name in ("drop_loop", "drop_method")


@pytest.mark.parametrize("bug", BUGS[:: max(1, len(BUGS) // 8)], ids=lambda bug: bug.modifier)
def test_the_patch_takes_the_bug_back(bug: Bug, tmp_path: Path) -> None:
    whole = tree_of(shop=SHOP)
    repository = GitRepository.create(tmp_path / "task.git")
    broken, solved = (
        repository.commit(tree, "shop", name) for tree, name in ((buggy(whole, bug), "broken"), (whole, "solved"))
    )
    buggy(whole, bug).write(tmp_path / "work")
    patch = repository.diff(broken, solved)
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path / "work", check=True)
    assert (tmp_path / "work" / "shop.py").read_text() == SHOP
    assert repository.without(solved, (patch,), "shop", "again") == broken


def test_commits_depend_on_the_files_alone(tmp_path: Path) -> None:
    tree = tree_of(shop=SHOP)
    first, second = (GitRepository.create(tmp_path / name).commit(tree, "shop", "main") for name in ("a", "b"))
    assert first == second
    assert GitRepository(tmp_path / "a").tree(first) == tree


def test_what_an_older_version_had_comes_first() -> None:
    older = tree_of(shop=SHOP.replace("name.strip(), count", "name, count"))
    first = candidates(tree_of(shop=SHOP), ["shop.py"], {}, 0, older, "1")[0]
    assert (first.modifier, first.function) == (REOPENED, "Basket.note")
    assert "self.previous = name, count" in (buggy(tree_of(shop=SHOP), first).text("shop.py") or "")


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\r\n", "\ufeffx = 1\n", "\0"])
def test_a_file_that_cannot_be_edited_has_no_bugs(text: str) -> None:
    assert not list(bugs_of("a.py", text))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aé\n €", max_size=40), st.data())
def test_edits_by_position_are_edits_of_bytes(text: str, data: st.DataObject) -> None:
    text = "".join(f"# {line}\n" for line in text.split("\n"))
    raw = text.encode()
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, len(raw)))
    try:
        expected = (raw[:start] + b"new" + raw[end:]).decode()
    except UnicodeDecodeError:
        return
    assert PythonSource(text).apply([Edit(start=start, end=end, text="new")]) == expected
