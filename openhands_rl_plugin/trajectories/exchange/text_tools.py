"""Tools in the system prompt, as OpenHands describes them to models without native tool calls; both ways."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.function_text import Newlines
from openhands_rl_plugin.core.types import JsonObject

_HEAD = "\nYou have access to the following functions:\n\n"
# The block that says IMPORTANT is never closed in the prompt of the published rows, and is kept so.
_TAIL = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format, start with <function= and end with </function>
- Required parameters MUST be specified
- Only call one function at a time
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after.
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
"""
_CLOSED_TAIL = _TAIL + "</IMPORTANT>\n"
"""The ending in OpenHands 1.6, whose values stand between their tags as they are."""

_NO_PARAMETERS = "No parameters are required for this function.\n"
_NO_DESCRIPTION = "No description provided"
_FUNCTION = re.compile(
    r"---- BEGIN FUNCTION #(?P<number>\d+): (?P<name>[^\n]*) ----\nDescription: (?P<body>.*?)"
    r"---- END FUNCTION #(?P=number) ----\n",
    re.DOTALL,
)
_PARAMETER = re.compile(r"^  \((\d+)\) (\S+) \(([^\n]*?), (required|optional)\): ", re.MULTILINE)
_ALLOWED = re.compile(r"\nAllowed values: \[`(?P<values>[^\n]*)`\]\Z")


class SystemPrompt(NamedTuple):
    """A system prompt taken apart. ``newlines``: how the version that wrote it treats values of several lines."""

    content: str
    tools: tuple[JsonObject, ...]
    newlines: Newlines


def system_prompt(content: str, tools: Sequence[JsonObject]) -> str:
    """``content`` with the description of the tools and the rules of the text form; itself without tools."""
    return f"{content}{_HEAD}{describe_tools(tools)}{_TAIL}" if tools else content


def read_system_prompt(text: str) -> SystemPrompt:
    """The inverse of ``system_prompt``, also for OpenHands 1.6. What does not read back exactly stays content."""
    for tail, newlines in ((_CLOSED_TAIL, Newlines.VERBATIM), (_TAIL, Newlines.WRAPPED)):
        if text.endswith(tail) and (start := text.rfind(_HEAD)) >= 0:
            described = text[start + len(_HEAD) : -len(tail)]
            tools = tuple(_read_tools(described))
            if describe_tools(tools) == described:
                return SystemPrompt(text[:start], tools, newlines)
    return SystemPrompt(text, (), Newlines.WRAPPED)


def describe_tools(tools: Sequence[JsonObject]) -> str:
    """One block a tool, in the order of the tools and of their properties."""
    return "\n".join(_describe(number, _function(tool)) for number, tool in enumerate(tools, 1))


def _describe(number: int, function: JsonObject) -> str:
    lines = f"---- BEGIN FUNCTION #{number}: {function['name']} ----\nDescription: {function.get('description', '')}\n"
    schema = function.get("parameters")
    if not isinstance(schema, dict):
        return f"{lines}{_NO_PARAMETERS}---- END FUNCTION #{number} ----\n"
    properties, required = schema.get("properties"), schema.get("required")
    needed = required if isinstance(required, list) else []
    parameters = enumerate(properties.items() if isinstance(properties, dict) else (), 1)
    listed = "".join(f"  ({at}) {name} {_declared(info, name in needed)}\n" for at, (name, info) in parameters)
    return f"{lines}Parameters:\n{listed}---- END FUNCTION #{number} ----\n"


def _declared(info: JsonValue, required: bool) -> str:
    known = info if isinstance(info, dict) else {}
    allowed = known.get("enum")
    values = ", ".join(f"`{value}`" for value in allowed) if isinstance(allowed, list) else None
    suffix = "" if values is None else f"\nAllowed values: [{values}]"
    status = "required" if required else "optional"
    return f"({known.get('type', 'string')}, {status}): {known.get('description', _NO_DESCRIPTION)}{suffix}"


def _read_tools(described: str) -> Iterator[JsonObject]:
    for match in _FUNCTION.finditer(described):
        function: JsonObject = {"name": match["name"]}
        body = match["body"]
        if body.endswith(f"\n{_NO_PARAMETERS}"):
            function["description"] = body[: -len(_NO_PARAMETERS) - 1]
        else:
            description, _, listed = body.rpartition("\nParameters:\n")
            function["description"] = description
            function["parameters"] = _read_parameters(listed)
        yield {"type": "function", "function": function}


def _read_parameters(listed: str) -> JsonObject:
    starts = []
    for match in _PARAMETER.finditer(listed):
        # A numbered line inside a description is no parameter.
        if int(match[1]) == len(starts) + 1:
            starts.append(match)
    properties: JsonObject = {}
    required: list[JsonValue] = []
    for match, following in zip_longest(starts, starts[1:]):
        properties[match[2]] = _read_property(match[3], listed[match.end() : following and following.start()])
        if match[4] == "required":
            required.append(match[2])
    schema: JsonObject = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def _read_property(kind: str, text: str) -> JsonObject:
    description = text.removesuffix("\n")
    info: JsonObject = {"type": kind}
    if allowed := _ALLOWED.search(description):
        description = description[: allowed.start()]
        values = allowed["values"].split("`, `")
        info["enum"] = [*values] if kind == "string" else [_number(value) for value in values]
    if description != _NO_DESCRIPTION:
        info["description"] = description
    return info


def _number(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _function(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    return function if isinstance(function, dict) else {"name": ""}
