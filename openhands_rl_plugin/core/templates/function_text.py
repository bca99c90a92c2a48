"""Calls as text the way OpenHands writes them for models without native tool calls, both ways and without loss.

    <function=str_replace_editor>
    <parameter=command>view</parameter>
    <parameter=view_range>[1, 20]</parameter>
    <parameter=new_str>
        first line, indented
    last line
    </parameter>
    </function>

A value is exactly what stands between its tags. Only if it begins *and* ends with a line break is one of each taken
off, because a value of several lines is written with a break after the opening and before the closing tag. Parameters
that the tool declares with other types than ``string`` are JSON.

Whatever that form would not give back exactly is written as ``<json>`` + JSON + ``</json>`` between the tags, with
``\\u003c`` for ``<``: a string that holds the form's own tags, a value that is not of the declared type, or one that is
no string where the tool is not known. If a parameter's name cannot stand in a tag, the call's body is one JSON object.

Tags inside a value that was not written so are its text if they are balanced, or if nothing that belongs to a call
follows them. Everything else that has more than one reading is a problem, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from openhands_rl_plugin.core.templates.answers import scan
from openhands_rl_plugin.core.templates.function_reader import Reader, bare_name, tags_of
from openhands_rl_plugin.core.templates.function_values import Newlines, as_json, write_value
from openhands_rl_plugin.core.templates.parsed import ParsedAnswer, RenderError
from openhands_rl_plugin.core.templates.signatures import check, signature
from openhands_rl_plugin.core.types import JsonObject, ToolCall


def render_call(call: ToolCall, tool: JsonObject | None = None) -> str:
    """The call as text. ``tool`` declares the types; without it only strings are written plainly.

    Raises RenderError when the arguments are not a JSON object or the function's name cannot stand in a tag.
    """
    if not _can_stand(call.name):
        raise RenderError(f"the function name {call.name!r} cannot stand in a tag; rename the function")
    try:
        arguments = json.loads(call.arguments or "{}")
        json.dumps(arguments, allow_nan=False)  # NaN and the infinities are no JSON, though Python reads them
    except (ValueError, RecursionError) as error:
        raise RenderError(f"the arguments of {call.name!r} are not JSON ({error}); mend or drop the call") from error
    if not isinstance(arguments, dict):
        raise RenderError(f"the arguments of {call.name!r} are no JSON object; mend or drop the call")
    if not all(_can_stand(name) for name in arguments):
        return f"<function={call.name}>\n{as_json(arguments)}\n</function>"
    declared = signature(tool)
    written = (
        f"<parameter={name}>{write_value(value, declared.parameter(name))}</parameter>\n"
        for name, value in arguments.items()
    )
    return f"<function={call.name}>\n{''.join(written)}</function>"


def read_function_text(
    text: str, tools: Sequence[JsonObject] = (), newlines: Newlines = Newlines.WRAPPED
) -> ParsedAnswer:
    """Take an answer apart. ``tools`` say the types of the parameters; whether a call keeps to them is not checked."""
    tags = tags_of(text)
    reader = Reader(text, tags, tools, newlines)
    return scan(text, tags, reader.read, reader.read_end)


def parse_function_text(
    text: str, tools: Sequence[JsonObject] = (), newlines: Newlines = Newlines.WRAPPED
) -> ParsedAnswer:
    """Take an answer apart; a call that does not keep to ``tools`` (none: not checked) is a problem."""
    return check(read_function_text(text, tools, newlines), tools)


def _can_stand(name: str) -> bool:
    """Whether a name is read back from a tag as it is."""
    return bool(name) and name == bare_name(name) and not any(mark in name for mark in "<>\n")
