"""The twelve kinds of bugs of repair tasks. Nine are made by the modifiers of ``bugs``, three by those here."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from openhands_rl_plugin.evals.tasks.bugs import conditions, statements, values
from openhands_rl_plugin.evals.tasks.bugs.positions import (
    Edit,
    FunctionModifier,
    FunctionSite,
    Mutation,
    PythonSource,
    blocks,
    one,
    own_nodes,
    parse,
)

_MOST_OTHERS = 3


def other_variable(site: FunctionSite) -> Iterator[Mutation]:
    """A variable is read in place of another one of the function."""
    arguments = site.node.args
    known = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    for node in own_nodes(site.node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.append(node.id)
    names = list(dict.fromkeys(known))
    for node in own_nodes(site.node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            for other in [name for name in names if name != node.id][:_MOST_OTHERS]:
                yield one(site.source.replaced(node, other), node.lineno)


def drop_return(site: FunctionSite) -> Iterator[Mutation]:
    """``return x`` -> ``x``."""
    for block in blocks(site.node):
        for node in block:
            if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
                start, _ = site.source.span(node)
                yield one(Edit(start=start, end=site.source.span(node.value)[0], text=""), node.lineno)


def other_index(site: FunctionSite) -> Iterator[Mutation]:
    """``x[0]`` -> ``x[1]``, ``x[-1]`` -> ``x[0]``, ``x[1:]`` -> ``x[:1]``."""
    for node in own_nodes(site.node):
        if not isinstance(node, ast.Subscript):
            continue
        if isinstance(node.slice, ast.Slice):
            lower, upper = node.slice.lower, node.slice.upper
            if node.slice.step is None and (lower is None) != (upper is None):
                bound = lower or upper
                assert bound is not None
                text = site.source.text(bound)
                yield one(site.source.replaced(node.slice, f"{text}:" if upper else f":{text}"), node.lineno)
            continue
        try:
            index = ast.literal_eval(node.slice)
        except ValueError:
            continue
        if type(index) is int:
            for other in {0: (1, -1), -1: (0, -2)}.get(index, (index - 1, index + 1)):
                yield one(site.source.replaced(node.slice, str(other)), node.lineno)


def other_text(site: FunctionSite) -> Iterator[Mutation]:
    """Another short text: ``"_"`` -> ``"-"``, ``" "`` -> ``""``."""
    others = dict(zip(("", " ", *"_-,./:0"), (" ", "", *"-_;,.;1"), strict=True))
    for node in own_nodes(site.node):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in others:
            yield one(site.source.replaced(node, repr(others[node.value])), node.lineno)


def other_default(site: FunctionSite) -> Iterator[Mutation]:
    """The default of an argument is another text, or none where there was one."""
    arguments, body = site.node.args, site.node.body[-1].lineno
    others: dict[object, str] = {
        "": "' '",
        " ": "''",
        "_": "'-'",
        "-": "'_'",
        ",": "';'",
        None: "0",
    }
    for default in (*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)):
        if isinstance(default, ast.Constant) and isinstance(default.value, str | None) and default.value in others:
            yield one(site.source.replaced(default, others[default.value]), body)


KINDS: Mapping[str, tuple[FunctionModifier, ...]] = {
    "operator": (values.swap_operator, conditions.swap_boolean_operator),
    "comparison": (conditions.move_boundary,),
    "off by one": (values.miss_by_one,),
    "constant": (values.shift_number, values.flip_boolean, other_text),
    "wrong variable": (other_variable,),
    "missing return": (drop_return,),
    "swapped arguments": (values.swap_arguments, values.swap_operands),
    "inverted condition": (conditions.negate_condition, conditions.swap_branches),
    "missing case": (conditions.drop_guard, conditions.drop_clause, statements.drop_assignment),
    "wrong index": (other_index,),
    "wrong method": (values.swap_name, values.drop_conversion),
    "wrong default": (values.change_default, other_default),
}
"""Kind -> the modifiers that make it."""


def bugs_in(text: str, name: str) -> Iterator[tuple[str, str]]:
    """``(kind, text with the bug)`` for every bug of the module's function ``name``, without repetitions."""
    source = PythonSource(text)
    node = next(each for each in source.tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    seen = {ast.dump(source.tree)}
    for kind, modifiers in KINDS.items():
        for modifier in modifiers:
            for mutation in modifier(FunctionSite(source, node, name)):
                try:
                    changed = source.apply(mutation.edits)
                    meaning = ast.dump(parse(changed))
                    compile(changed, "bug", "exec")
                except (SyntaxError, ValueError):
                    continue
                if meaning not in seen:
                    seen.add(meaning)
                    yield kind, changed
