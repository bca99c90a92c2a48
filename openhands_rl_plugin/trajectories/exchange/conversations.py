"""Conversations in rows: OpenAI's chat messages with reasoning, arguments as objects or as text, one call a turn, and
tools as the text of a system prompt.

Chat templates differ in what they want. Those of Qwen2.5 and Llama 3.1 print a text once more as JSON, so that a model
would learn to quote its arguments; DeepSeek V3's takes text only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_of, reasoning_with, to_wire
from openhands_rl_plugin.core.templates.function_text import Newlines
from openhands_rl_plugin.core.types import JsonObject, Message, Node, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, from_text
from openhands_rl_plugin.trajectories.exchange.writing import JSON, Columns

ArgumentsForm = Literal["object", "string"]
ARGUMENTS_FORMS: tuple[ArgumentsForm, ...] = ("object", "string")

CONVERSATION: list[Any] = [
    {
        "role": "string",
        "content": "string",
        "reasoning_content": "string",
        "tool_calls": [{"id": "string", "type": "string", "function": {"name": "string", "arguments": JSON}}],
        "tool_call_id": "string",
        "name": "string",
    }
]
"""The Parquet type of a conversation; trainers take null for absent."""
TOOLS: list[Any] = [JSON]
_ARGUMENTS = "arguments"


def spoken_messages(trajectory: Trajectory, leaf: int | None = None) -> list[SpokenMessage]:
    """The messages from the root to ``leaf`` (default: the head), answers with their reasoning."""
    return spoken(trajectory, trajectory.path(leaf))


def spoken(trajectory: Trajectory, nodes: Sequence[int]) -> list[SpokenMessage]:
    """The messages of some nodes, answers with their reasoning."""
    return [_spoken(trajectory.nodes[at]) for at in nodes]


def wire_of(message: Message) -> JsonObject:
    """An OpenAI chat message, its reasoning in ``reasoning_content``."""
    wire: JsonObject = to_wire(message)
    reasoning = reasoning_with(message)
    return wire if reasoning is None else {**wire, "reasoning_content": reasoning}


def conversation_of(trajectory: Trajectory, path: Sequence[int]) -> list[JsonValue]:
    """The messages of some nodes, for a row."""
    return [wire_of(message) for message in spoken(trajectory, path)]


def _spoken(node: Node) -> SpokenMessage:
    reasoning = reasoning_of(node) if node.message.role == "assistant" else None
    return SpokenMessage(**dict(node.message), reasoning=reasoning, sampled=node.sampled)


def arguments_object(arguments: str) -> JsonObject | None:
    """The arguments of a call as an object; ``None`` when the text is none."""
    try:
        value = from_text(arguments or "{}")
    except ExchangeError:
        return None
    return value if isinstance(value, dict) else None


def with_objects(row: JsonObject) -> JsonObject:
    """The row with the arguments of all calls as objects; a malformed text stays as it is."""
    return {name: _with_objects(value) if isinstance(value, list) else value for name, value in row.items()}


def as_text(columns: Columns) -> Columns:
    """The columns for rows whose arguments are text."""
    return {name: _as_text(kind) for name, kind in columns.items()}


def _with_objects(value: JsonValue, key: str = "") -> JsonValue:
    if isinstance(value, list):
        return [_with_objects(each, key) for each in value]
    if isinstance(value, dict) and key in ("", "tool_calls", "function"):
        return {name: _with_objects(each, name) for name, each in value.items()}
    known = arguments_object(value) if key == _ARGUMENTS and isinstance(value, str) else None
    return value if known is None else known


def _as_text(kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return {name: "string" if name == _ARGUMENTS else _as_text(inner) for name, inner in kind.items()}
    return [_as_text(each) for each in kind] if isinstance(kind, list) else kind


class Turns(NamedTuple):
    """The reshaped conversation, and how many calls without a result had to be left out of it."""

    messages: list[Message]
    unanswered: int


def single_call_turns(messages: Sequence[Message]) -> Turns:
    """Split every message with several calls into one message a call, each followed by its own result.

    Results are matched by call id. In a split message a call that got no result cannot stand between two others, so it
    is left out and counted; the first stays when none got one. Results learn the name of their call.
    """
    out: list[Message] = []
    unanswered = at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        results = []
        while message.tool_calls and at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        if len(message.tool_calls) < 2:
            out += [message, *(_named(result, message.tool_calls) for result in results)]
            continue
        pairs, strays = _paired(message.tool_calls, results)
        kept = [pair for pair in pairs if pair[1] is not None] or pairs[:1]
        unanswered += len(pairs) - len(kept)
        for number, (call, result) in enumerate(kept):
            part = message.model_copy(update={"tool_calls": (call,)})
            out.append(part if number == 0 else _without_text(part))
            out += [_named(result, (call,))] if result is not None else []
        out += strays
    return Turns(out, unanswered)


def until_last_answer(messages: Sequence[Message]) -> list[Message]:
    """Without what came after the assistant's last message: nothing is learned from it."""
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return list(messages[: last + 1])


_Pair = tuple[ToolCall, Message | None]


def _paired(calls: Sequence[ToolCall], results: Sequence[Message]) -> tuple[list[_Pair], list[Message]]:
    """Each call with its result, and the results that belong to none of the calls."""
    left = list(results)
    pairs: list[_Pair] = []
    for call in calls:
        result = next((each for each in left if each.tool_call_id == call.id), None)
        # Records without ids keep results in the order of their calls.
        if result is None and left and left[0].tool_call_id is None:
            result = left[0]
        if result is not None:
            left.remove(result)
        pairs.append((call, result))
    return pairs, left


def _without_text(message: Message) -> Message:
    """The text and the reasoning stand with the first of the calls."""
    reasoning = {"reasoning": None} if isinstance(message, SpokenMessage) else {}
    return message.model_copy(update={"content": None, **reasoning})


def _named(result: Message, calls: Sequence[ToolCall]) -> Message:
    if result.name is not None or not calls:
        return result
    call = next((call for call in calls if call.id == result.tool_call_id), calls[0])
    return result.model_copy(update={"name": call.name})


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
