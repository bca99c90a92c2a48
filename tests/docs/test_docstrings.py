"""Examples in docstrings run; those of one module share their names, and its own docstring imports what all need."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest
from page_session import ROOT
from sybil import Sybil
from sybil.parsers.rest import DocTestParser


def has_example(file: Path) -> bool:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, documented)]
    return any(">>> " in (ast.get_docstring(node) or "") for node in nodes)


FILES = [file for file in sorted((ROOT / "openhands_rl_plugin").rglob("*.py")) if has_example(file)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_examples_in_docstrings(file: Path) -> None:
    ran = 0
    for example in Sybil([DocTestParser(optionflags=doctest.ELLIPSIS)], pattern="*.py").parse(file):
        example.evaluate()
        ran += 1
    assert ran
