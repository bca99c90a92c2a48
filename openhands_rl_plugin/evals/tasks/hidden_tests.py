"""Removes the failing tests of a bug from the repository: the test patch adds them again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from openhands_rl_plugin.evals.tasks.bugs.positions import FUNCTIONS, Edit, PythonSource, definitions, parse
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree


def file_of(test: str) -> str:
    """``tests/test_a.py::TestB::test_c[1]`` -> ``tests/test_a.py``."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """``tests/test_a.py::TestB::test_c[1]`` -> ``test_c``; empty for a test that is no function."""
    return test.partition("[")[0].split("::")[-1] if "::" in test else ""


def without_tests(tree: SourceTree, tests: Iterable[str]) -> Mapping[str, str | None]:
    """New texts of the test files, without the functions of ``tests``; ``None`` deletes the file.

    A file is deleted when one of the tests is no function in it, or when no other test is left.
    """
    functions: dict[str, set[str]] = {}
    for test in tests:
        functions.setdefault(file_of(test), set()).add(function_of(test))
    return {path: _without(tree.text(path), names) for path, names in sorted(functions.items())}


def _without(text: str | None, names: set[str]) -> str | None:
    if text is None:
        return None
    try:
        source = PythonSource(text)
    except SyntaxError:
        return None
    found = [(parent, node) for parent, node in _functions(source.tree) if node.name in names]
    if {node.name for _, node in found} != names or not all(source.stands_alone(node) for _, node in found):
        return None
    left = [node for _, node in _functions(source.tree) if node.name.startswith("test") and node.name not in names]
    if not left:
        return None
    edits: list[Edit] = []
    for parent in {id(parent): parent for parent, _ in found}.values():
        gone = [node for of, node in found if of is parent]
        edits += _deletions(source, parent, gone)
    try:
        new = source.apply(_outermost(edits))
        parse(new)
    except (SyntaxError, ValueError):
        return None
    return new


def _functions(tree: ast.Module) -> Iterable[tuple[ast.Module | ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]]:
    parents: list[ast.Module | ast.ClassDef] = [tree]
    parents += [node for _, node in definitions(tree) if isinstance(node, ast.ClassDef)]
    for parent in parents:
        for statement in parent.body:
            if isinstance(statement, FUNCTIONS):
                yield parent, statement


def _deletions(source: PythonSource, parent: ast.Module | ast.ClassDef, gone: Sequence[ast.stmt]) -> list[Edit]:
    if isinstance(parent, ast.ClassDef) and not _needed(source, parent, gone):
        return [_deletion(source, parent)]
    edits = [_deletion(source, node) for node in gone]
    if len(gone) == len(parent.body):
        start, end = source.lines(gone[0])
        edits[0] = Edit(start=start, end=end, text=f"{source.indentation(gone[0])}pass\n")
    return edits


def _needed(source: PythonSource, owner: ast.ClassDef, gone: Sequence[ast.stmt]) -> bool:
    """Whether a class has more than ``gone`` and a docstring, or others name it."""
    left = [node for node in owner.body if node not in gone and not _is_text(node)]
    named = any(isinstance(node, ast.Name) and node.id == owner.name for node in ast.walk(source.tree))
    return bool(left) or named


def _deletion(source: PythonSource, node: ast.stmt) -> Edit:
    """Its lines, and the empty ones before them."""
    start, end = source.lines(node)
    before = source.data[:start]
    while before.endswith(b"\n\n"):
        before = before[:-1]
    return Edit(start=len(before), end=end, text="")


def _outermost(edits: list[Edit]) -> list[Edit]:
    return [
        edit
        for edit in edits
        if not any(each is not edit and each.start <= edit.start and edit.end <= each.end for each in edits)
    ]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
