"""Which bugs are tried, and in which order."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from openhands_rl_plugin.evals.tasks.bugs.positions import FUNCTIONS, Edit, Function, PythonSource, definitions
from openhands_rl_plugin.evals.tasks.bugs.table import Bug, bugs_of
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree

REOPENED = "reopen_fix"
"""The modifier that is none: a function as it was in an older version."""


def key_of(bug: Bug) -> str:
    """A name for a bug: the same edits of the same file have the same."""
    return hashlib.sha256(bug.model_dump_json(exclude={"modifier"}).encode()).hexdigest()[:12]


def buggy(tree: SourceTree, bug: Bug) -> SourceTree:
    """The tree with the bug. Raises ``ValueError`` when the file is not the one that the bug was made for."""
    text = tree.text(bug.path)
    if text is None:
        raise ValueError(f"{bug.path} is no text")
    return tree.changed({bug.path: PythonSource(text).apply(bug.edits)})


def candidates(
    tree: SourceTree,
    code: Iterable[str],
    covered: Mapping[str, Mapping[int, int]],
    least: float,
    older: SourceTree | None,
    seed: str,
) -> list[Bug]:
    """The bugs that tests may notice, in an order that ``seed`` alone decides: modifiers take turns, functions too.

    What an older version had comes first. A bug in a line that fewer than ``least`` tests run cannot fail more of them;
    without figures on covered lines every line counts.
    """
    order = random.Random(seed)
    reopened: list[Bug] = []
    by_modifier: dict[str, list[Bug]] = {}
    for path in code:
        text = tree.text(path)
        if text is None:
            continue
        lines = covered.get(path, {})
        reopened += _reopened(path, text, older.text(path) if older is not None else None)
        for bug in bugs_of(path, text):
            if not covered or lines.get(bug.line, 0) >= max(1, least):
                by_modifier.setdefault(bug.modifier, []).append(bug)
    for bugs in (reopened, *(by_modifier[name] for name in sorted(by_modifier))):
        order.shuffle(bugs)
    names = sorted(by_modifier)
    order.shuffle(names)
    return [*reopened, *_in_turns([by_modifier[name] for name in names])]


def _in_turns(groups: Sequence[list[Bug]]) -> Iterator[Bug]:
    """One of each group after the other; within a group, functions that were not yet tried come first."""
    tried: set[tuple[str, str]] = set()
    left = [list(group) for group in groups]
    while any(left):
        for group in left:
            if group:
                at = next((index for index, bug in enumerate(group) if (bug.path, bug.function) not in tried), 0)
                bug = group.pop(at)
                tried.add((bug.path, bug.function))
                yield bug


def _meaning(node: Function) -> list[str]:
    """What a function does, whatever its docstring and annotations say."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return [ast.dump(statement) for statement in body]


def _reopened(path: str, text: str, old_text: str | None) -> list[Bug]:
    """The functions that an older version had with another body, each put back as it was."""
    if old_text is None or old_text == text:
        return []
    try:
        new, old = PythonSource(text), PythonSource(old_text)
    except SyntaxError:
        return []
    before = {name: node for name, node in definitions(old.tree) if isinstance(node, FUNCTIONS)}
    found: list[Bug] = []
    for name, node in definitions(new.tree):
        past = before.get(name)
        if past is None or not isinstance(node, FUNCTIONS) or not (new.stands_alone(node) and old.stands_alone(past)):
            continue
        if past.col_offset != node.col_offset or any("." in name and name.startswith(f"{b.function}.") for b in found):
            continue
        start, end = new.lines(node)
        was = old.between(*old.lines(past))
        if _meaning(past) != _meaning(node):
            edits = (Edit(start=start, end=end, text=was),)
            found.append(Bug(path=path, modifier=REOPENED, function=name, line=node.body[-1].lineno, edits=edits))
    return found
