"""The size of the code, in lines without blanks, comments and docstrings: it may only fall, see ``budget.json``."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET: dict[str, int] = json.loads((ROOT / "tests/budget.json").read_text(encoding="utf-8"))


@cache
def code_lines(file: Path) -> int:
    source = file.read_text(encoding="utf-8")
    lines = {at for at, line in enumerate(source.split("\n"), 1) if line.strip() and not line.lstrip().startswith("#")}
    documentation: set[int] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            continue
        if isinstance(node, ast.Constant | ast.JoinedStr):  # what looks like a comment or a blank line is text
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        pending.extend(ast.iter_child_nodes(node))
    return len(lines - documentation)


@pytest.mark.parametrize("folder", BUDGET)
def test_no_folder_is_over_its_budget(folder: str) -> None:
    """Who adds takes away elsewhere, and lowers the figure where something went."""
    assert sum(map(code_lines, (ROOT / folder).rglob("*.py"))) <= BUDGET[folder]
