"""The size of the code, in lines without blanks, comments and docstrings: it may only fall, see ``budget.json``."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET: dict[str, int] = json.loads((ROOT / "tests/budget.json").read_text(encoding="utf-8"))
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@cache
def code_lines(file: Path) -> int:
    source = file.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


@pytest.mark.parametrize("folder", BUDGET)
def test_no_folder_is_over_its_budget(folder: str) -> None:
    """Who adds takes away elsewhere, and lowers the figure where something went."""
    assert sum(map(code_lines, (ROOT / folder).rglob("*.py"))) <= BUDGET[folder]
