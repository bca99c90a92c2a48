"""Edits of Python source by byte positions, which leave the rest of the file as it is; and what a modifier takes
(``FunctionSite``, ``ClassSite``) and returns (``Mutation``).
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.types import Frozen

type Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
type Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


class Edit(Frozen):
    """Put ``text`` in place of the bytes from ``start`` to before ``end``."""

    start: int
    end: int
    text: str


class PythonSource:
    """The text of one Python file. Raises ``SyntaxError`` when it cannot be edited by position."""

    def __init__(self, text: str) -> None:
        if "\r" in text or "\f" in text or text.startswith("\ufeff"):
            raise SyntaxError("only plain line feeds end the lines that can be edited")
        self.data = text.encode()
        try:
            self.tree = parse(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from error
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """The byte at a line (from 1) and a column (in bytes, from 0)."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.excepthandler | ast.arg) -> tuple[int, int]:
        """The bytes of a node, decorators and surrounding parentheses left out."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def between(self, start: int, end: int) -> str:
        """The text of a range of bytes."""
        return self.data[start:end].decode()

    def text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The text of a node."""
        return self.between(*self.span(node))

    def replaced(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> Edit:
        """The edit that puts ``text`` in place of a node."""
        start, end = self.span(node)
        return Edit(start=start, end=end, text=text)

    def lines(self, first: ast.stmt, last: ast.stmt | None = None) -> tuple[int, int]:
        """The bytes of the whole lines from ``first`` (with its decorators) to the end of ``last``."""
        assert (last or first).end_lineno is not None
        decorators = first.decorator_list if isinstance(first, DEFINITIONS) else []
        start = min([first.lineno, *(each.lineno for each in decorators)])
        return self._starts[start - 1], self._starts[(last or first).end_lineno or 0]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Whether a statement shares its lines with nothing but a comment."""
        start, end = self.span(statement)
        first, last = self.lines(statement)
        before, after = self.data[first:start].strip(), self.data[end:last].strip()
        return (not before or isinstance(statement, DEFINITIONS)) and (not after or after.startswith(b"#"))

    def indentation(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        return self.between(self._starts[statement.lineno - 1], self.span(statement)[0])

    def apply(self, edits: Sequence[Edit]) -> str:
        """The text after ``edits``, which may not overlap. Raises ``ValueError`` when they do."""
        return edited(self.data, edits)


def parse(text: str) -> ast.Module:
    """The syntax tree of a file, without Python's syntax warnings.

    Raises ``SyntaxError``, and ``ValueError`` for text with zero bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(text)


def edited(data: bytes, edits: Sequence[Edit]) -> str:
    """The text of ``data`` after ``edits``. Raises ``ValueError`` when they overlap."""
    before = len(data)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        if edit.end > before:
            raise ValueError("edits overlap")
        data, before = data[: edit.start] + edit.text.encode() + data[edit.end :], edit.start
    return data.decode()


def definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Every function and class with its dotted name, outer ones first. What is defined under a condition counts too."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, at = waiting.pop(0)
        for child in ast.iter_child_nodes(at):
            if isinstance(child, DEFINITIONS):
                yield prefix + child.name, child
                waiting.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, ast.stmt | ast.excepthandler):
                waiting.append((prefix, child))


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function's body without its docstring, annotations, f-strings and what is defined within."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (*DEFINITIONS, ast.Lambda, ast.JoinedStr)):
            continue
        yield node
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting.extend(child for child in ast.iter_child_nodes(node) if child is not annotation)


def blocks(function: Function) -> Iterator[list[ast.stmt]]:
    """The lists of statements of a function, those of its loops and branches too."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if body:
        yield body
    for node in own_nodes(function):
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                yield inner


def block_statements(function: Function) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """Every statement of a function's ``blocks``, with its block."""
    return ((block, statement) for block in blocks(function) for statement in block)


@dataclass(frozen=True)
class FunctionSite:
    """A function of a file: where a modifier may change something."""

    source: PythonSource
    node: Function
    name: str


@dataclass(frozen=True)
class ClassSite:
    """A class of a file."""

    source: PythonSource
    node: Definition
    name: str


@dataclass(frozen=True)
class Mutation:
    """One possible bug: the edits, and the line (from 1) that has to be executed for the bug to show."""

    edits: tuple[Edit, ...]
    line: int


type FunctionModifier = Callable[[FunctionSite], Iterator[Mutation]]
type ClassModifier = Callable[[ClassSite], Iterator[Mutation]]


def one(edit: Edit, line: int) -> Mutation:
    """A bug of a single edit."""
    return Mutation((edit,), line)


def delete_statement(source: PythonSource, block: Sequence[ast.stmt], statement: ast.stmt) -> Edit | None:
    """The edit that removes ``statement`` from its block; ``pass`` stands for the last one. ``None``: not possible."""
    if not source.stands_alone(statement):
        return None
    start, end = source.lines(statement)
    return Edit(start=start, end=end, text=f"{source.indentation(statement)}pass\n" if len(block) == 1 else "")


def unindented(source: PythonSource, outer: ast.stmt, body: Sequence[ast.stmt]) -> Edit | None:
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
