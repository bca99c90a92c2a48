"""Bugs in what is computed: operators, operands, constants, calls and defaults."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from openhands_rl_plugin.evals.tasks.bugs.positions import Edit, FunctionSite, Mutation, PythonSource, one, own_nodes

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
