"""The table of modifiers, and all bugs that they can make in a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.tasks.bugs import conditions, statements, values
from openhands_rl_plugin.evals.tasks.bugs.positions import (
    FUNCTIONS,
    ClassModifier,
    ClassSite,
    Definition,
    Edit,
    FunctionModifier,
    FunctionSite,
    PythonSource,
    definitions,
    edited,
    parse,
)

IN_FUNCTIONS: Mapping[str, FunctionModifier] = {
    each.__name__: each
    for each in (
        conditions.negate_condition,
        conditions.move_boundary,
        conditions.swap_branches,
        conditions.swap_boolean_operator,
        conditions.drop_clause,
        conditions.drop_guard,
        conditions.drop_condition,
        values.swap_operator,
        values.swap_operands,
        values.shift_number,
        values.flip_boolean,
        values.miss_by_one,
        values.change_default,
        values.drop_conversion,
        values.swap_name,
        values.swap_arguments,
        values.drop_keyword,
        values.swap_results,
        statements.drop_assignment,
        statements.drop_call,
        statements.stop_loop_early,
        statements.drop_loop,
        statements.drop_try,
        statements.narrow_handler,
        statements.swap_statements,
        statements.swap_jump,
        statements.drop_result,
    )
}
IN_CLASSES: Mapping[str, ClassModifier] = {
    each.__name__: each for each in (statements.drop_base, statements.drop_method)
}
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
