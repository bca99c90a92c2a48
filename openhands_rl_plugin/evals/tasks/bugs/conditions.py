"""Bugs in what is decided: conditions, comparisons and branches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from openhands_rl_plugin.evals.tasks.bugs.positions import (
    Edit,
    FunctionSite,
    Mutation,
    PythonSource,
    block_statements,
    delete_statement,
    one,
    own_nodes,
    unindented,
)

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
