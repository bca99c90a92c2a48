"""The candidate bugs of a package, in the order of attempts."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from openhands_rl_plugin.evals.tasks.bugs.positions import FUNCTIONS, Edit, Function, PythonSource, definitions
from openhands_rl_plugin.evals.tasks.bugs.table import Bug, bugs_of
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree

REOPENED = "reopen_fix"
"""The name of the modifier that restores a function of an older version."""


def key_of(bug: Bug) -> str:
    """A key for a bug: equal edits of the same file have equal keys."""
    return hashlib.sha256(bug.model_dump_json(exclude={"modifier"}).encode()).hexdigest()[:12]


def buggy(tree: SourceTree, bug: Bug) -> SourceTree:
    """The tree with the bug. Raises ``ValueError`` when the bug was made for another text of the file."""
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
    """The bugs that tests may detect, in an order that depends on ``seed`` only: modifiers and functions alternate.

    Functions of an older version come first. Bugs in lines that fewer than ``least`` tests execute are left out;
    without coverage every line counts.
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
    """Round-robin over groups; within a group, functions without an attempt come first."""
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
    """The syntax of a function's body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return [ast.dump(statement) for statement in body]


def _reopened(path: str, text: str, old_text: str | None) -> list[Bug]:
    """The functions with another body in an older version, each restored to that."""
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
