"""The modifiers of syntax trees that put bugs into functions and classes, and all bugs that they make in a file."""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

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


_OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_BOUNDARY: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def negate_condition(site: FunctionSite) -> Iterator[Mutation]:
    """``if a == b`` -> ``if a != b``, ``if x`` -> ``if not x``, ``if not x`` -> ``if x``."""
    for node in own_nodes(site.node):
        if not isinstance(node, ast.If | ast.While | ast.IfExp):
            continue
        test = node.test
        if isinstance(test, ast.Compare) and (edit := _other_comparison(site.source, test, _OPPOSITE)):
            yield one(edit, test.lineno)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            if site.source.text(test).startswith("not ") and isinstance(test.operand, _SIMPLE):
                yield one(site.source.replaced(test, site.source.text(test.operand)), test.lineno)
        elif isinstance(test, _SIMPLE):
            yield one(site.source.replaced(test, f"not {site.source.text(test)}"), test.lineno)


def move_boundary(site: FunctionSite) -> Iterator[Mutation]:
    """``a < b`` -> ``a <= b`` and the like."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Compare) and (edit := _other_comparison(site.source, node, _BOUNDARY)):
            yield one(edit, node.lineno)


def swap_branches(site: FunctionSite) -> Iterator[Mutation]:
    """What is done if, is done else, and the other way round."""
    source = site.source
    for node in own_nodes(site.node):
        if isinstance(node, ast.IfExp):
            yield Mutation(_swapped(source, node.body, node.orelse), node.test.lineno)
        elif isinstance(node, ast.If) and node.orelse and not _is_elif(source, node.orelse):
            if not all(source.stands_alone(each) for each in (*node.body, *node.orelse)):
                continue
            first = source.lines(node.body[0], node.body[-1])
            second = source.lines(node.orelse[0], node.orelse[-1])
            edits = (
                Edit(start=first[0], end=first[1], text=source.between(*second)),
                Edit(start=second[0], end=second[1], text=source.between(*first)),
            )
            yield Mutation(edits, node.lineno)


def swap_boolean_operator(site: FunctionSite) -> Iterator[Mutation]:
    """``a and b`` -> ``a or b``, and the other way round."""
    for node in own_nodes(site.node):
        if not (isinstance(node, ast.BoolOp) and len(node.values) == 2):
            continue
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        start, end = site.source.span(node.values[0])[1], site.source.span(node.values[1])[0]
        gap = site.source.between(start, end)
        if len(re.findall(rf"\b{old}\b", gap)) == 1 and "#" not in gap:
            yield one(Edit(start=start, end=end, text=re.sub(rf"\b{old}\b", new, gap)), node.lineno)


def drop_clause(site: FunctionSite) -> Iterator[Mutation]:
    """``a and b`` -> ``a``, or ``b``."""
    for node in own_nodes(site.node):
        if not isinstance(node, ast.BoolOp):
            continue
        word = "and" if isinstance(node.op, ast.And) else "or"
        spans = [site.source.span(value) for value in node.values]
        for at in range(1, len(spans)):
            if site.source.between(spans[at - 1][1], spans[at][0]).strip() != word:
                continue
            yield one(Edit(start=spans[at - 1][1], end=spans[at][1], text=""), node.lineno)
            if at == 1:
                yield one(Edit(start=spans[0][0], end=spans[1][0], text=""), node.lineno)


def drop_guard(site: FunctionSite) -> Iterator[Mutation]:
    """A condition without ``else`` goes, with all that it guards."""
    for block, statement in block_statements(site.node):
        if _is_plain(statement, site.source) and (edit := delete_statement(site.source, block, statement)):
            yield one(edit, statement.lineno)


def drop_condition(site: FunctionSite) -> Iterator[Mutation]:
    """A condition without ``else`` goes; what it guarded is always done."""
    for _, statement in block_statements(site.node):
        if _is_plain(statement, site.source) and (edit := unindented(site.source, statement, statement.body)):
            yield one(edit, statement.body[0].lineno)


def _is_plain(statement: ast.stmt, source: PythonSource) -> TypeGuard[ast.If]:
    """An ``if`` with neither ``else`` nor ``elif``, which is no ``elif`` itself."""
    return isinstance(statement, ast.If) and not statement.orelse and not _is_elif(source, [statement])


def _is_elif(source: PythonSource, statements: list[ast.stmt]) -> bool:
    return isinstance(statements[0], ast.If) and source.text(statements[0]).startswith("elif")


def _other_comparison(source: PythonSource, node: ast.Compare, others: dict[type[ast.cmpop], str]) -> Edit | None:
    if len(node.ops) != 1 or (new := others.get(type(node.ops[0]))) is None:
        return None
    start, end = source.span(node.left)[1], source.span(node.comparators[0])[0]
    gap = source.between(start, end)
    found = re.fullmatch(r"(\)*\s*)(==|!=|<=|>=|<|>|not\s+in|in|is\s+not|is)(\s*\(*)", gap)
    if found is None or (new.isidentifier() and not (found[1] and found[3])):
        return None
    return Edit(start=start, end=end, text=f"{found[1]}{new}{found[3]}")


def _swapped(source: PythonSource, first: ast.expr, second: ast.expr) -> tuple[Edit, Edit]:
    return source.replaced(first, source.text(second)), source.replaced(second, source.text(first))


_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_PARTNERS = (
    ("lower", "upper"),
    ("lstrip", "rstrip"),
    ("startswith", "endswith"),
    ("split", "rsplit"),
    ("partition", "rpartition"),
    ("find", "rfind"),
    ("index", "rindex"),
    ("ljust", "rjust"),
    ("append", "extend"),
    ("keys", "values"),
    ("min", "max"),
    ("any", "all"),
    ("search", "match"),
)
_OTHER_NAME = {**dict(_PARTNERS), **{second: first for first, second in _PARTNERS}}
_SUPERFLUOUS_METHODS = {"strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "copy", "casefold"}
_SUPERFLUOUS_CALLS = {"str", "int", "list", "tuple", "set", "sorted", "reversed", "abs", "bool", "float", "dict"}


def swap_operator(site: FunctionSite) -> Iterator[Mutation]:
    """``+`` -> ``-``, ``*`` -> ``+``, ``//`` -> ``/`` and the like."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node.left):
            old, new = _OPERATORS[type(node.op)]
            start, end = site.source.span(node.left)[1], site.source.span(node.right)[0]
            gap = site.source.between(start, end)
            if gap.strip("() \t\n") == old:
                yield one(Edit(start=start, end=end, text=gap.replace(old, new)), node.lineno)


def swap_operands(site: FunctionSite) -> Iterator[Mutation]:
    """``a - b`` -> ``b - a``, ``a in b`` -> ``b in a``."""
    for node in own_nodes(site.node):
        pair: tuple[ast.expr, ast.expr] | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
            pair = (node.left, node.right)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], _SYMMETRIC):
            pair = (node.left, node.comparators[0])
        if pair and all(isinstance(each, _ATOMS) for each in pair) and not (_is_number(pair[0]) or _is_number(pair[1])):
            yield from _exchange(site.source, *pair)


_SYMMETRIC = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


def shift_number(site: FunctionSite) -> Iterator[Mutation]:
    """A whole number grows by one, or shrinks by one."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Constant) and _is_number(node) and re.fullmatch(r"\d+", site.source.text(node)):
            value = int(site.source.text(node))
            yield one(site.source.replaced(node, str(value + 1)), node.lineno)
            if value > 0:
                yield one(site.source.replaced(node, str(value - 1)), node.lineno)


def flip_boolean(site: FunctionSite) -> Iterator[Mutation]:
    """``True`` -> ``False``, and the other way round."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield one(site.source.replaced(node, str(not node.value)), node.lineno)


def miss_by_one(site: FunctionSite) -> Iterator[Mutation]:
    """The bound of a slice or of ``range`` is one off, and ``len(x)`` one too small."""
    for node in own_nodes(site.node):
        bounds: list[ast.expr | None] = []
        if isinstance(node, ast.Slice):
            bounds = [node.lower, node.upper]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "range":
                bounds = [*node.args[:2]]
            elif node.func.id == "len":
                bounds = [node]
        for bound in bounds:
            if isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                text = site.source.text(bound)
                yield one(site.source.replaced(bound, f"{text} - 1"), bound.lineno)
                if bound is not node:
                    yield one(site.source.replaced(bound, f"{text} + 1"), bound.lineno)


def change_default(site: FunctionSite) -> Iterator[Mutation]:
    """The default of an argument is another one."""
    arguments, body = site.node.args, site.node.body[-1].lineno
    for default in (*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)):
        if not isinstance(default, ast.Constant):
            continue
        if isinstance(default.value, bool):
            yield one(site.source.replaced(default, str(not default.value)), body)
        elif isinstance(default.value, int) and re.fullmatch(r"\d+", site.source.text(default)):
            yield one(site.source.replaced(default, str(default.value + 1)), body)


def drop_conversion(site: FunctionSite) -> Iterator[Mutation]:
    """``str(x)`` -> ``x``, ``x.strip()`` -> ``x``."""
    for node in own_nodes(site.node):
        if not isinstance(node, ast.Call) or node.keywords:
            continue
        left: ast.expr | None = None
        if isinstance(node.func, ast.Name) and node.func.id in _SUPERFLUOUS_CALLS and len(node.args) == 1:
            left = node.args[0]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _SUPERFLUOUS_METHODS:
            left = node.func.value
        if isinstance(left, _ATOMS):
            yield one(site.source.replaced(node, site.source.text(left)), node.lineno)


def swap_name(site: FunctionSite) -> Iterator[Mutation]:
    """A call of the wrong one of two alike: ``min`` for ``max``, ``lstrip`` for ``rstrip``."""
    for node in own_nodes(site.node):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and (other := _OTHER_NAME.get(node.func.id)):
            yield one(site.source.replaced(node.func, other), node.lineno)
        elif isinstance(node.func, ast.Attribute) and (other := _OTHER_NAME.get(node.func.attr)):
            end = site.source.span(node.func)[1]
            yield one(Edit(start=end - len(node.func.attr), end=end, text=other), node.lineno)


def swap_arguments(site: FunctionSite) -> Iterator[Mutation]:
    """``f(a, b)`` -> ``f(b, a)``."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Call):
            for first, second in zip(node.args, node.args[1:], strict=False):
                if isinstance(first, _ATOMS) and isinstance(second, _ATOMS):
                    yield from _exchange(site.source, first, second)


def drop_keyword(site: FunctionSite) -> Iterator[Mutation]:
    """``f(a, key=b)`` -> ``f(a)``."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Call):
            yield from _without_keyword(site.source, node)


def swap_results(site: FunctionSite) -> Iterator[Mutation]:
    """``return a, b`` -> ``return b, a``; the same for what is yielded and assigned."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Return | ast.Yield | ast.Assign) and isinstance(node.value, ast.Tuple):
            first, second, *others = [*node.value.elts, None, None]
            if len(others) == 2 and isinstance(first, _ATOMS) and isinstance(second, _ATOMS):
                yield from _exchange(site.source, first, second)


def _without_keyword(source: PythonSource, node: ast.Call) -> Iterator[Mutation]:
    parts: Sequence[ast.expr | ast.keyword] = sorted(
        (*node.args, *node.keywords), key=lambda part: (part.lineno, part.col_offset)
    )
    for before, part in itertools.pairwise(parts):
        if isinstance(part, ast.keyword) and part.arg is not None:
            start, end = source.span(before)[1], source.span(part)[1]
            if source.between(start, source.span(part)[0]).strip() == ",":
                yield one(Edit(start=start, end=end, text=""), part.lineno)


def _exchange(source: PythonSource, first: ast.expr, second: ast.expr) -> Iterator[Mutation]:
    one_text, other_text = source.text(first), source.text(second)
    if one_text != other_text and "\n" not in one_text + other_text:
        yield Mutation((source.replaced(first, other_text), source.replaced(second, one_text)), first.lineno)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


_PLAIN = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)


def drop_assignment(site: FunctionSite) -> Iterator[Mutation]:
    """An attribute or an item is not set, a name not changed: what had a value before keeps it."""
    known = {argument.arg for argument in ast.walk(site.node.args) if isinstance(argument, ast.arg)}
    for block, statement in block_statements(site.node):
        if isinstance(statement, ast.AugAssign):
            droppable = True
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            droppable = not isinstance(target, ast.Name) or target.id in known
            known |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        else:
            continue
        if droppable and (edit := delete_statement(site.source, block, statement)):
            yield one(edit, statement.lineno)


def drop_call(site: FunctionSite) -> Iterator[Mutation]:
    """A call with an unused result is removed."""
    for block, statement in block_statements(site.node):
        called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if called and (edit := delete_statement(site.source, block, statement)):
            yield one(edit, statement.lineno)


def stop_loop_early(site: FunctionSite) -> Iterator[Mutation]:
    """A loop ends after its first round."""
    for node in own_nodes(site.node):
        if (
            isinstance(node, ast.For | ast.While)
            and not isinstance(node.body[-1], ast.Break | ast.Continue | ast.Return)
            and all(site.source.stands_alone(each) for each in node.body)
        ):
            end = site.source.lines(node.body[-1])[1]
            text = f"{site.source.indentation(node.body[-1])}break\n"
            yield one(Edit(start=end, end=end, text=text), node.body[0].lineno)


def drop_loop(site: FunctionSite) -> Iterator[Mutation]:
    """A loop is not run at all."""
    for block, statement in block_statements(site.node):
        if isinstance(statement, ast.For | ast.While) and (edit := delete_statement(site.source, block, statement)):
            yield one(edit, statement.body[0].lineno)


def drop_try(site: FunctionSite) -> Iterator[Mutation]:
    """What was tried is done without a handler."""
    for _, statement in block_statements(site.node):
        if not isinstance(statement, ast.Try) or statement.orelse or statement.finalbody:
            continue
        if edit := unindented(site.source, statement, statement.body):
            yield one(edit, statement.handlers[0].body[0].lineno)


def narrow_handler(site: FunctionSite) -> Iterator[Mutation]:
    """``except (A, B)`` -> ``except A``, or ``except B``."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Tuple):
            for kept in node.type.elts:
                yield one(site.source.replaced(node.type, site.source.text(kept)), node.body[0].lineno)


def swap_statements(site: FunctionSite) -> Iterator[Mutation]:
    """Two plain statements that follow each other, the other way round."""
    source = site.source
    for block in blocks(site.node):
        for first, second in itertools.pairwise(block):
            if not (isinstance(first, _PLAIN) and isinstance(second, _PLAIN)):
                continue
            if source.stands_alone(first) and source.stands_alone(second):
                start, middle = source.lines(first)
                begin, end = source.lines(second)
                text = source.between(begin, end) + source.between(middle, begin) + source.between(start, middle)
                yield one(Edit(start=start, end=end, text=text), first.lineno)


def swap_jump(site: FunctionSite) -> Iterator[Mutation]:
    """``break`` -> ``continue``, and the other way round."""
    for node in own_nodes(site.node):
        if isinstance(node, ast.Break | ast.Continue):
            start, end = site.source.span(node)
            text = "continue" if isinstance(node, ast.Break) else "break"
            yield one(Edit(start=start, end=end, text=text), node.lineno)


def drop_result(site: FunctionSite) -> Iterator[Mutation]:
    """A branch no longer returns: what follows is done as well."""
    for block in blocks(site.node):
        last = block[-1]
        if block[0] is site.node.body[0] or not isinstance(last, ast.Return) or last.value is None:
            continue
        if edit := delete_statement(site.source, block, last):
            yield one(edit, last.lineno)


def drop_base(site: ClassSite) -> Iterator[Mutation]:
    """A class has one base less."""
    if not isinstance(site.node, ast.ClassDef) or site.node.keywords or not site.node.bases:
        return
    spans = [site.source.span(base) for base in site.node.bases]
    line = site.node.lineno
    if len(spans) == 1:
        if site.source.between(spans[0][0] - 1, spans[0][1] + 1) == f"({site.source.text(site.node.bases[0])})":
            yield one(Edit(start=spans[0][0] - 1, end=spans[0][1] + 1, text=""), line)
        return
    for at in range(len(spans)):
        start, end = (spans[at][0], spans[at + 1][0]) if at == 0 else (spans[at - 1][1], spans[at][1])
        yield one(Edit(start=start, end=end, text=""), line)


def drop_method(site: ClassSite) -> Iterator[Mutation]:
    """A class lacks a method that something stands in for: a special one, or one of a base."""
    if not isinstance(site.node, ast.ClassDef):
        return
    for statement in site.node.body:
        if not isinstance(statement, FUNCTIONS) or not _is_replaceable(statement, bool(site.node.bases)):
            continue
        if edit := delete_statement(site.source, site.node.body, statement):
            yield one(edit, statement.body[-1].lineno)


def _is_replaceable(method: Function, inherits: bool) -> bool:
    special = method.name.startswith("__") and method.name.endswith("__")
    return (special and method.name not in {"__init__", "__new__"}) or (inherits and not special)


IN_FUNCTIONS: Mapping[str, FunctionModifier] = {
    each.__name__: each
    for each in (
        negate_condition,
        move_boundary,
        swap_branches,
        swap_boolean_operator,
        drop_clause,
        drop_guard,
        drop_condition,
        swap_operator,
        swap_operands,
        shift_number,
        flip_boolean,
        miss_by_one,
        change_default,
        drop_conversion,
        swap_name,
        swap_arguments,
        drop_keyword,
        swap_results,
        drop_assignment,
        drop_call,
        stop_loop_early,
        drop_loop,
        drop_try,
        narrow_handler,
        swap_statements,
        swap_jump,
        drop_result,
    )
}
IN_CLASSES: Mapping[str, ClassModifier] = {each.__name__: each for each in (drop_base, drop_method)}
NAMES = (*IN_FUNCTIONS, *IN_CLASSES)


class Bug(Frozen):
    """A change of one file. ``line`` (from 1, before the change) has to be executed for the bug to show."""

    path: str
    modifier: str
    function: str
    line: int
    edits: tuple[Edit, ...]


def bugs_of(path: str, text: str) -> Iterator[Bug]:
    """Every bug that the modifiers can put into a file, each of which parses and changes what the file means.

    A file that cannot be edited by position has none.
    """
    try:
        source = PythonSource(text)
    except SyntaxError:
        return
    for name, node in definitions(source.tree):
        if isinstance(node, FUNCTIONS):
            found = ((label, each(FunctionSite(source, node, name))) for label, each in IN_FUNCTIONS.items())
        else:
            found = ((label, each(ClassSite(source, node, name))) for label, each in IN_CLASSES.items())
        meaning = _meaning(source, node, ())
        for label, mutations in found:
            for mutation in mutations:
                if _meaning(source, node, mutation.edits) not in (None, meaning):
                    yield Bug(path=path, modifier=label, function=name, line=mutation.line, edits=mutation.edits)


def _meaning(source: PythonSource, node: Definition, edits: tuple[Edit, ...]) -> str | None:
    """What a definition says after ``edits``, which lie within it; ``None`` when that is no Python."""
    start, end = source.lines(node)
    inside = [edit.model_copy(update={"start": edit.start - start, "end": edit.end - start}) for edit in edits]
    try:
        text = edited(source.data[start:end], inside)
        return ast.dump(parse(f"if True:\n{text}" if node.col_offset else text))
    except (SyntaxError, ValueError):
        return None
