"""The bugs that can be put into a function, as edits of its text."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

type Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
type Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


class Edit(NamedTuple):
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

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The bytes of a node, decorators and surrounding parentheses left out."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def between(self, start: int, end: int) -> str:
        """The text of a range of bytes."""
        return self.data[start:end].decode()

    def text(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        return self.between(*self.span(node))

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """The edit that puts ``text`` in place of a node."""
        return Edit(*self.span(node), text)

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
        """The text after ``edits``. Raises ``ValueError`` when they overlap."""
        data, before = self.data, len(self.data)
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
            if edit.end > before:
                raise ValueError("edits overlap")
            data, before = data[: edit.start] + edit.text.encode() + data[edit.end :], edit.start
        return data.decode()


def parse(text: str) -> ast.Module:
    """The syntax tree of a file, without Python's syntax warnings.

    Raises ``SyntaxError``, and ``ValueError`` for text with zero bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(text)


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


type _Found = Iterator[tuple[str, tuple[Edit, ...]]]


class Mutation(NamedTuple):
    """One possible bug: its kind, the line (from 1) that has to be executed for it to show, and the edits."""

    kind: str
    line: int
    edits: tuple[Edit, ...]


_BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_OPPOSITE |= {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
_LOGIC = {"and": "or", "or": "and"}
_OPERATORS = {"+": "-", "-": "+", "*": "+", "/": "//", "//": "/", "%": "//", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}
_PAIRS = (
    *("lower", "upper", "lstrip", "rstrip", "startswith", "endswith", "split", "rsplit", "partition", "rpartition"),
    *("find", "rfind", "index", "rindex", "ljust", "rjust", "append", "extend", "keys", "values", "min", "max"),
    *("any", "all", "search", "match"),
)
_OTHER_NAME = {name: _PAIRS[at ^ 1] for at, name in enumerate(_PAIRS)}
_CONVERSIONS = {
    *("str", "int", "list", "tuple", "set", "sorted", "reversed", "abs", "bool", "float", "dict"),
    *("strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "copy", "casefold"),
}
_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
_ATOMS = (*_SIMPLE, ast.Constant)


def mutations(source: PythonSource, function: Function) -> Iterator[Mutation]:
    """The bugs of the kinds ``KINDS`` in a function. Some do not parse, or do not change what the function does."""
    for node in own_nodes(function):
        if isinstance(node, ast.expr | ast.stmt):
            for kind, edits in _of_node(source, node):
                yield Mutation(kind, node.lineno, edits)
    known = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for block in blocks(function):
        for statement in block:
            kind = _droppable(statement, known, inner=block[0] is not function.body[0])
            if kind and source.stands_alone(statement) and not source.text(statement).startswith("elif"):
                start, end = source.lines(statement)
                line = statement.body[0].lineno if isinstance(statement, ast.For | ast.While) else statement.lineno
                put = f"{source.indentation(statement)}pass\n" if len(block) == 1 else ""
                yield Mutation(kind, line, (Edit(start, end, put),))
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(default, ast.Constant) and (other := [*_constants(source, default)]):
            yield Mutation("change_default", function.body[-1].lineno, (source.replaced(default, other[0]),))


def _of_node(source: PythonSource, node: ast.expr | ast.stmt) -> _Found:
    """``(kind, edits)`` for what is wrong in one place."""
    text, replaced = source.text, source.replaced

    def operator(kind: str, left: ast.expr, right: ast.expr, others: Mapping[str, str]) -> _Found:
        start, end = source.span(left)[1], source.span(right)[0]
        gap = source.between(start, end)
        if new := others.get(old := gap.strip("() \t\n")):
            yield kind, (Edit(start, end, gap.replace(old, new)),)

    def exchange(kind: str, first: ast.expr, second: ast.expr) -> _Found:
        one, other = text(first), text(second)
        if isinstance(first, _ATOMS) and isinstance(second, _ATOMS) and one != other and "\n" not in one + other:
            yield kind, (replaced(first, other), replaced(second, one))

    if isinstance(node, ast.If | ast.While | ast.IfExp):
        match node.test:
            case ast.Compare(ops=[_], left=left, comparators=[right]):
                yield from operator("negate_condition", left, right, _OPPOSITE)
            case ast.UnaryOp(op=ast.Not(), operand=operand) if isinstance(operand, _SIMPLE):
                yield "negate_condition", (replaced(node.test, text(operand)),)
            case test if isinstance(test, _SIMPLE):
                yield "negate_condition", (replaced(test, f"not {text(test)}"),)
    match node:
        case ast.IfExp(body=body, orelse=other):
            yield "swap_branches", (replaced(body, text(other)), replaced(other, text(body)))
        case ast.If(body=body, orelse=[_, *_] as other) if not text(other[0]).startswith("elif"):
            if all(map(source.stands_alone, (*body, *other))):
                first, second = source.lines(body[0], body[-1]), source.lines(other[0], other[-1])
                edits = Edit(*first, source.between(*second)), Edit(*second, source.between(*first))
                yield "swap_branches", edits
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            yield from operator("move_boundary", left, right, _BOUNDARY)
            if not isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and not _has_number(left, right):
                yield from exchange("swap_operands", left, right)
        case ast.BinOp(left=left, op=op, right=right):
            if not isinstance(left, ast.JoinedStr) and not (
                isinstance(left, ast.Constant) and isinstance(left.value, str | bytes)
            ):
                yield from operator("swap_operator", left, right, _OPERATORS)
            if isinstance(op, ast.Add | ast.Sub | ast.Div | ast.FloorDiv | ast.Mod) and not _has_number(left, right):
                yield from exchange("swap_operands", left, right)
        case ast.BoolOp(values=values):
            if len(values) == 2:
                yield from operator("swap_boolean_operator", values[0], values[1], _LOGIC)
            spans = [source.span(value) for value in values]
            for at, ((start, end), (following, last)) in enumerate(pairwise(spans)):
                if source.between(end, following).strip() in _LOGIC:
                    yield "drop_clause", (Edit(end, last, ""),)
                    if at == 0:
                        yield "drop_clause", (Edit(start, following, ""),)
        case ast.Constant():
            kind = "flip_boolean" if isinstance(node.value, bool) else "shift_number"
            yield from ((kind, (replaced(node, other),)) for other in _constants(source, node))
        case ast.Slice(lower=lower, upper=upper):
            yield from _off_by_one(source, (lower, upper))
        case ast.Call(func=function, args=arguments):
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if isinstance(function, ast.Name) and name == "range":
                yield from _off_by_one(source, arguments[:2])
            elif isinstance(function, ast.Name) and name == "len":
                yield "miss_by_one", (replaced(node, f"{text(node)} - 1"),)
            if name in _OTHER_NAME:
                end = source.span(function)[1]
                yield "swap_name", (Edit(end - len(name), end, _OTHER_NAME[name]),)
            inner = function.value if isinstance(function, ast.Attribute) else arguments[0] if arguments else None
            if name in _CONVERSIONS and isinstance(inner, _ATOMS) and not node.keywords and len(arguments) < 2:
                yield "drop_conversion", (replaced(node, text(inner)),)
            for first, second in pairwise(arguments):
                yield from exchange("swap_arguments", first, second)


def _has_number(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and type(node.value) is int for node in nodes)


def _constants(source: PythonSource, node: ast.Constant) -> Iterator[str]:
    """What stands in the place of a truth value or of a whole number."""
    if isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node.value, int) and source.text(node).isdecimal():
        yield from map(str, (node.value + 1, *([node.value - 1] if node.value else [])))


def _off_by_one(source: PythonSource, bounds: Iterable[ast.expr | None]) -> _Found:
    for bound in bounds:
        if isinstance(bound, _SIMPLE):
            for change in ("- 1", "+ 1"):
                yield "miss_by_one", (source.replaced(bound, f"{source.text(bound)} {change}"),)


def _droppable(statement: ast.stmt, known: set[str], *, inner: bool) -> str:
    """The kind of bug that leaving a statement out is; empty where nothing stands in for it.

    ``known``: names with a value so far; those that the statement assigns are added. ``inner``: in a branch or a loop.
    """
    match statement:
        case ast.If(orelse=[]):
            return "drop_guard"
        case ast.For() | ast.While():
            return "drop_loop"
        case ast.Expr(value=ast.Call()):
            return "drop_call"
        case ast.Return(value=ast.expr()) if inner:
            return "drop_result"
        case ast.AugAssign():
            return "drop_assignment"
        case ast.Assign(targets=[target]):
            kept = not isinstance(target, ast.Name) or target.id in known
            known |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
            return "drop_assignment" if kept else ""
    return ""


KINDS = (
    *("negate_condition", "move_boundary", "swap_branches", "swap_boolean_operator", "drop_clause", "swap_operator"),
    *("swap_operands", "shift_number", "flip_boolean", "miss_by_one", "change_default", "drop_conversion"),
    *("swap_name", "swap_arguments", "drop_guard", "drop_loop", "drop_call", "drop_result", "drop_assignment"),
)
"""The kinds of bugs."""


class Bug(NamedTuple):
    """A change of one file. ``line`` (from 1, before the change) has to be executed for the bug to show."""

    path: str
    modifier: str
    function: str
    line: int
    edits: tuple[Edit, ...]


def bugs_of(path: str, text: str) -> Iterator[Bug]:
    """Every bug that can be put into the functions of a file; each parses and changes what the file means.

    A file that cannot be edited by position has none.
    """
    try:
        source = PythonSource(text)
    except SyntaxError:
        return
    for name, node in definitions(source.tree):
        if isinstance(node, FUNCTIONS):
            meaning = _meaning(source, node, ())
            for kind, line, edits in mutations(source, node):
                if _meaning(source, node, edits) not in (None, meaning):
                    yield Bug(path, kind, name, line, edits)


def _meaning(source: PythonSource, node: Function, edits: tuple[Edit, ...]) -> str | None:
    """What a function says after ``edits``, which lie within it; ``None`` when that is no Python."""
    start, end = source.lines(node)
    shift = len(source.data) - end
    try:
        text = source.apply(edits).encode()
        text = text[start : len(text) - shift].decode()
        return ast.dump(parse(f"if True:\n{text}" if node.col_offset else text))
    except (SyntaxError, ValueError):
        return None
