"""The bugs that can be put into a function, as edits of its text."""

from __future__ import annotations

import ast
import difflib
import io
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


class Positions:
    """The bytes of a Python file, and where nodes are in them."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.split(b"\n"):
            self.starts.append(min(self.starts[-1] + len(line) + 1, len(self.data)))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The bytes of a node, decorators and surrounding parentheses left out."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset


class PythonSource(Positions):
    """The text of one Python file. Raises ``SyntaxError`` when it cannot be edited by position."""

    def __init__(self, text: str) -> None:
        if "\r" in text or "\f" in text or text.startswith("\ufeff"):
            raise SyntaxError("only plain line feeds end the lines that can be edited")
        super().__init__(text)
        try:
            self.tree = parse(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from error

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
        return self.starts[start - 1], self.starts[(last or first).end_lineno or 0]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Whether a statement shares its lines with nothing but a comment."""
        start, end = self.span(statement)
        first, last = self.lines(statement)
        before, after = self.data[first:start].strip(), self.data[end:last].strip()
        return (not before or isinstance(statement, DEFINITIONS)) and (not after or after.startswith(b"#"))

    def indentation(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        return self.between(self.starts[statement.lineno - 1], self.span(statement)[0])

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


KINDS = (
    *("operator", "comparison", "off by one", "constant", "wrong variable", "missing return", "swapped arguments"),
    *("inverted condition", "missing case", "wrong index", "wrong method", "wrong default"),
)
"""The kinds of bugs."""
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
_OTHER_TEXT = dict(zip(("", " ", *"_-,./:0"), (" ", "", *"-_;,.;1"), strict=True))
_OTHER_DEFAULT = {"": "' '", " ": "''", "_": "'-'", "-": "'_'", ",": "';'", None: "0"}
_MOST_OTHERS = 3
_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
_ATOMS = (*_SIMPLE, ast.Constant)


def mutations(source: PythonSource, function: Function) -> Iterator[tuple[str, int, tuple[Edit, ...]]]:
    """``(kind, line, edits)`` of the bugs of the kinds ``KINDS`` in a function; see ``Bug``.

    Some do not parse, or do not change what the function does.
    """
    known = {argument.arg: None for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    nodes = [*own_nodes(function)]
    stored = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    names = [*(known | dict.fromkeys(stored))]
    for node in nodes:
        if isinstance(node, ast.expr | ast.stmt):
            for kind, *edits in _of_node(source, node, names):
                yield kind, node.lineno, tuple(edits)
    for block in blocks(function):
        for statement in block:
            alone = source.stands_alone(statement) and not source.text(statement).startswith("elif")
            if _droppable(statement, known) and alone:
                put = f"{source.indentation(statement)}pass\n" if len(block) == 1 else ""
                yield "missing case", statement.lineno, (Edit(*source.lines(statement), put),)
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(default, ast.Constant):
            text = default.value if isinstance(default.value, str | None) else 0
            others = [_OTHER_DEFAULT[text]] if text in _OTHER_DEFAULT else [*_constants(source, default)][:1]
            for other in others:
                yield "wrong default", function.body[-1].lineno, (source.replaced(default, other),)


def _of_node(
    source: PythonSource, node: ast.expr | ast.stmt, names: Sequence[str]
) -> Iterator[tuple[str, *tuple[Edit, ...]]]:
    """``(kind, edit, ...)`` for what is wrong in one place. ``names``: those of the function."""
    text, replaced = source.text, source.replaced

    def operator(kind: str, left: ast.expr, right: ast.expr, others: Mapping[str, str]) -> Iterator[tuple[str, Edit]]:
        start, end = source.span(left)[1], source.span(right)[0]
        gap = source.between(start, end)
        if new := others.get(old := gap.strip("() \t\n")):
            yield kind, Edit(start, end, gap.replace(old, new))

    def exchange(first: ast.expr, second: ast.expr) -> Iterator[tuple[str, Edit, Edit]]:
        one, other = text(first), text(second)
        if isinstance(first, _ATOMS) and isinstance(second, _ATOMS) and one != other and "\n" not in one + other:
            yield "swapped arguments", replaced(first, other), replaced(second, one)

    if isinstance(node, ast.If | ast.While | ast.IfExp):
        match node.test:
            case ast.Compare(ops=[_], left=left, comparators=[right]):
                yield from operator("inverted condition", left, right, _OPPOSITE)
            case ast.UnaryOp(op=ast.Not(), operand=operand) if isinstance(operand, _SIMPLE):
                yield "inverted condition", replaced(node.test, text(operand))
            case test if isinstance(test, _SIMPLE):
                yield "inverted condition", replaced(test, f"not {text(test)}")
    match node:
        case ast.IfExp(body=body, orelse=other):
            yield "inverted condition", replaced(body, text(other)), replaced(other, text(body))
        case ast.If(body=body, orelse=[_, *_] as other) if not text(other[0]).startswith("elif"):
            if all(map(source.stands_alone, (*body, *other))):
                first, second = source.lines(body[0], body[-1]), source.lines(other[0], other[-1])
                edits = Edit(*first, source.between(*second)), Edit(*second, source.between(*first))
                yield "inverted condition", *edits
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            yield from operator("comparison", left, right, _BOUNDARY)
            if not isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and not _has_number(left, right):
                yield from exchange(left, right)
        case ast.BinOp(left=left, op=op, right=right):
            if not isinstance(left, ast.JoinedStr) and not (
                isinstance(left, ast.Constant) and isinstance(left.value, str | bytes)
            ):
                yield from operator("operator", left, right, _OPERATORS)
            if isinstance(op, ast.Add | ast.Sub | ast.Div | ast.FloorDiv | ast.Mod) and not _has_number(left, right):
                yield from exchange(left, right)
        case ast.BoolOp(values=values):
            if len(values) == 2:
                yield from operator("operator", values[0], values[1], _LOGIC)
            spans = [source.span(value) for value in values]
            for at, ((start, end), (following, last)) in enumerate(pairwise(spans)):
                if source.between(end, following).strip() in _LOGIC:
                    yield "missing case", Edit(end, last, "")
                    if at == 0:
                        yield "missing case", Edit(start, following, "")
        case ast.Constant(value=str() as value) if value in _OTHER_TEXT:
            yield "constant", replaced(node, repr(_OTHER_TEXT[value]))
        case ast.Constant():
            yield from (("constant", replaced(node, other)) for other in _constants(source, node))
        case ast.Name(id=name, ctx=ast.Load()) if name in names:
            for other in [other for other in names if other != name][:_MOST_OTHERS]:
                yield "wrong variable", replaced(node, other)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None) as index) if not (lower and upper):
            if bound := lower or upper:
                yield "wrong index", replaced(index, f"{text(bound)}:" if upper else f":{text(bound)}")
        case ast.Subscript(slice=ast.Constant() | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()) as index):
            if type(at := ast.literal_eval(index)) is int:
                for other in {0: (1, -1), -1: (0, -2)}.get(at, (at - 1, at + 1)):
                    yield "wrong index", replaced(index, str(other))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "missing return", Edit(source.span(node)[0], source.span(value)[0], "")
        case ast.Slice(lower=lower, upper=upper):
            yield from _off_by_one(source, (lower, upper))
        case ast.Call(func=function, args=arguments):
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if isinstance(function, ast.Name) and name == "range":
                yield from _off_by_one(source, arguments[:2])
            elif isinstance(function, ast.Name) and name == "len":
                yield "off by one", replaced(node, f"{text(node)} - 1")
            if name in _OTHER_NAME:
                end = source.span(function)[1]
                yield "wrong method", Edit(end - len(name), end, _OTHER_NAME[name])
            inner = function.value if isinstance(function, ast.Attribute) else arguments[0] if arguments else None
            if name in _CONVERSIONS and isinstance(inner, _ATOMS) and not node.keywords and len(arguments) < 2:
                yield "wrong method", replaced(node, text(inner))
            for first, second in pairwise(arguments):
                yield from exchange(first, second)


def _has_number(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and type(node.value) is int for node in nodes)


def _constants(source: PythonSource, node: ast.Constant) -> Iterator[str]:
    """The replacement of a truth value or of a whole number."""
    if isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node.value, int) and source.text(node).isdecimal():
        yield from map(str, (node.value + 1, *([node.value - 1] if node.value else [])))


def _off_by_one(source: PythonSource, bounds: Iterable[ast.expr | None]) -> Iterator[tuple[str, Edit]]:
    for bound in bounds:
        if isinstance(bound, _SIMPLE):
            for change in ("- 1", "+ 1"):
                yield "off by one", source.replaced(bound, f"{source.text(bound)} {change}")


def _droppable(statement: ast.stmt, known: dict[str, None]) -> bool:
    """Whether a bug may leave a statement out. ``known``: names with a value so far; it adds those that it assigns."""
    match statement:
        case ast.If(orelse=[]) | ast.Expr(value=ast.Call()) | ast.AugAssign():
            return True
        case ast.Assign(targets=[target]):
            kept = not isinstance(target, ast.Name) or target.id in known
            known.update({name.id: None for name in ast.walk(target) if isinstance(name, ast.Name)})
            return kept
    return False


class Bug(NamedTuple):
    """A change of one file. ``line`` (from 1, before the change) has to be executed for the bug to show."""

    path: str
    kind: str
    function: str
    line: int
    edits: tuple[Edit, ...]


def bugs_of(path: str, text: str) -> Iterator[Bug]:
    """Every bug that can be put into the functions of a file, without repetitions; each compiles and changes what the
    file means.

    A file that cannot be edited by position has none.
    """
    try:
        source = PythonSource(text)
    except SyntaxError:
        return
    for name, node in definitions(source.tree):
        if isinstance(node, FUNCTIONS):
            seen = {_meaning(source, node, ()), None}
            for kind, line, edits in mutations(source, node):
                if (meaning := _meaning(source, node, edits)) not in seen:
                    seen.add(meaning)
                    yield Bug(path, kind, name, line, edits)


def _meaning(source: PythonSource, node: Function, edits: tuple[Edit, ...]) -> str | None:
    """The text of a function after ``edits`` inside it; ``None`` if it is no valid Python."""
    start, end = source.lines(node)
    shift = len(source.data) - end
    try:
        text = source.apply(edits).encode()
        text = text[start : len(text) - shift].decode()
        tree = parse(f"if True:\n{text}" if node.col_offset else text)
        compile(tree, "bug", "exec", dont_inherit=True)
        return ast.dump(tree)
    except (SyntaxError, ValueError):
        return None


def patch_of(path: str, old: str | None, new: str) -> str:
    """The change of a file, or with ``None`` a new one, as a patch in git's form."""
    lines = difflib.unified_diff(
        _lines(old or ""), _lines(new), f"a/{path}" if old is not None else "/dev/null", f"b/{path}"
    )
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join([f"diff --git a/{path} b/{path}\n", *(["new file mode 100644\n"] if old is None else []), *ended])


def _lines(text: str) -> list[str]:
    """As git counts them: only a line feed ends one."""
    return io.StringIO(text, newline="\n").readlines()
