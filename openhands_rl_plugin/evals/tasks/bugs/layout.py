"""Edits of whole statements that keep the rest of the file as it stands."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from openhands_rl_plugin.evals.tasks.bugs.positions import Edit, Source


def delete_statement(source: Source, block: Sequence[ast.stmt], statement: ast.stmt) -> Edit | None:
    """The edit that removes ``statement`` from its block; ``pass`` stands for the last one. ``None``: not possible."""
    if not source.stands_alone(statement):
        return None
    start, end = source.lines(statement)
    return Edit(start=start, end=end, text=f"{source.indentation(statement)}pass\n" if len(block) == 1 else "")


def unindented(source: Source, outer: ast.stmt, body: Sequence[ast.stmt]) -> Edit | None:
    """The edit that puts ``body`` at the place of the statement around it. ``None``: not possible."""
    if not source.stands_alone(outer) or not all(source.stands_alone(each) for each in body):
        return None
    if any(_spans_lines(node) for each in body for node in ast.walk(each)):
        return None
    start, end = source.lines(outer)
    first, last = source.lines(body[0], body[-1])
    inner, own = source.indentation(body[0]), source.indentation(outer)
    lines = source.between(first, last).splitlines(keepends=True)
    if not inner.startswith(own) or not all(line.startswith(inner) or not line.strip(" \t\n#") for line in lines):
        return None
    text = "".join(own + line[len(inner) :] if line.strip() else line for line in lines)
    return Edit(start=start, end=end, text=text)


def _spans_lines(node: ast.AST) -> bool:
    """Whether a text runs over a line's end: its own white space must stay."""
    if isinstance(node, ast.Constant) and not isinstance(node.value, str | bytes):
        return False
    return isinstance(node, ast.JoinedStr | ast.Constant) and node.end_lineno != node.lineno
