"""Bugs in what is done: assignments, calls, loops, handlers, order; and in how classes are made."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from openhands_rl_plugin.evals.tasks.bugs.positions import (
    FUNCTIONS,
    ClassSite,
    Edit,
    Function,
    FunctionSite,
    Mutation,
    block_statements,
    blocks,
    delete_statement,
    one,
    own_nodes,
    unindented,
)

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
