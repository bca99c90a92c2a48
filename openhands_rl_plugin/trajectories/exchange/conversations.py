"""Conversations in rows: OpenAI's chat messages with reasoning, arguments as objects or as text. In the text form of
OpenHands calls and results are text, one call a turn, and the system prompt describes the tools.

Chat templates differ in what they want. Those of Qwen2.5 and Llama 3.1 print a text once more as JSON, so that a model
would learn to quote its arguments; DeepSeek V3's takes text only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any, Literal, NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import FINISH, SpokenMessage, reasoning_of, reasoning_with, to_wire
from openhands_rl_plugin.core.templates.function_text import Newlines, RenderError, read_function_text, render_call
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    LeftOutError,
    at_path,
    from_text,
    object_at,
    present,
)
from openhands_rl_plugin.trajectories.exchange.writing import JSON

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
_ARGUMENTS = "arguments"


def spoken_messages(trajectory: Trajectory, leaf: int | None = None) -> list[SpokenMessage]:
    """The messages from the root to ``leaf`` (default: the head), answers with their reasoning."""
    return spoken(trajectory, trajectory.path(leaf))


def spoken(trajectory: Trajectory, nodes: Sequence[int]) -> list[SpokenMessage]:
    """The messages of some nodes, answers with their reasoning."""
    found: list[SpokenMessage] = []
    for node in (trajectory.nodes[at] for at in nodes):
        reasoning = reasoning_of(node) if node.message.role == "assistant" else None
        found.append(SpokenMessage(**dict(node.message), reasoning=reasoning, sampled=node.sampled))
    return found


def wire_of(message: Message) -> JsonObject:
    """An OpenAI chat message, its reasoning in ``reasoning_content``."""
    return {**to_wire(message), **present(reasoning_content=reasoning_with(message))}


def conversation_of(trajectory: Trajectory, path: Sequence[int]) -> list[JsonValue]:
    """The messages of some nodes, for a row."""
    return [wire_of(message) for message in spoken(trajectory, path)]


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


def _with_objects(value: JsonValue, key: str = "") -> JsonValue:
    if isinstance(value, list):
        return [_with_objects(each, key) for each in value]
    if isinstance(value, dict) and key in ("", "tool_calls", "function"):
        return {name: _with_objects(each, name) for name, each in value.items()}
    known = arguments_object(value) if key == _ARGUMENTS and isinstance(value, str) else None
    return value if known is None else known


def as_text(kind: Any) -> Any:
    """Columns for rows whose arguments are text."""
    if isinstance(kind, Mapping):
        return {name: "string" if name == _ARGUMENTS else as_text(inner) for name, inner in kind.items()}
    return [as_text(each) for each in kind] if isinstance(kind, list) else kind


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
        left = [*takewhile(lambda each: each.role == "tool", messages[at + 1 :])] if message.tool_calls else []
        at += 1 + len(left)
        pairs = [(call, _taken(left, call)) for call in message.tool_calls]
        kept = [pair for pair in pairs if pair[1] is not None] or pairs[:1]
        unanswered += len(pairs) - len(kept)
        out += [] if kept else [message]
        for number, (call, result) in enumerate(kept):
            # The text and the reasoning stand with the first of the calls.
            beside = {"content": None, **({"reasoning": None} if isinstance(message, SpokenMessage) else {})}
            out.append(message.model_copy(update={"tool_calls": (call,), **(beside if number else {})}))
            out += [] if result is None else [_named(result, call)]
        out += [_named(each, message.tool_calls[0]) for each in left]
    return Turns(out, unanswered)


def _taken(left: list[Message], call: ToolCall) -> Message | None:
    """Take the result of a call from ``left``; records without ids keep results in the order of their calls."""
    found = next((each for each in left if each.tool_call_id == call.id), None)
    if found is None and left and left[0].tool_call_id is None:
        found = left[0]
    if found is not None:
        left.remove(found)
    return found


def _named(result: Message, call: ToolCall) -> Message:
    return result if result.name is not None else result.model_copy(update={"name": call.name})


def until_last_answer(messages: Sequence[Message]) -> list[Message]:
    """Without what came after the assistant's last message: nothing is learned from it."""
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return list(messages[: last + 1])


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
    return "\n".join(
        _describe(number, object_at(tool, "function") or {"name": ""}) for number, tool in enumerate(tools, 1)
    )


def _describe(number: int, function: JsonObject) -> str:
    schema, listed = function.get("parameters"), _NO_PARAMETERS
    if isinstance(schema, dict):
        required = at_path(schema, "required") or []
        parameters = enumerate(object_at(schema, "properties").items(), 1)
        lines = (f"  ({at}) {name} {_declared(info, name in required)}\n" for at, (name, info) in parameters)
        listed = f"Parameters:\n{''.join(lines)}"
    begin = f"---- BEGIN FUNCTION #{number}: {function['name']} ----\nDescription: {function.get('description', '')}\n"
    return f"{begin}{listed}---- END FUNCTION #{number} ----\n"


def _declared(info: JsonValue, required: bool) -> str:
    known = info if isinstance(info, dict) else {}
    allowed, status = known.get("enum"), "required" if required else "optional"
    values = ", ".join(f"`{value}`" for value in allowed) if isinstance(allowed, list) else None
    suffix = "" if values is None else f"\nAllowed values: [{values}]"
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


_RESULT = "EXECUTION RESULT of [{}]:\n"
_NAMELESS = "function"


def text_messages(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Messages with at most one call each in the text form. Raises ``LeftOutError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    # A reader has the tools from the prompt alone, which says less about a type than a schema does.
    described = read_system_prompt(system_prompt("", tools)).tools
    by_name = {str(at_path(tool, "function", "name")): tool for tool in described}
    for at, message in enumerate(messages):
        content = message.content or ""
        match message.role:
            case "system" if at == 0:
                content = system_prompt(content, tools)
            case "tool":
                content = _RESULT.format(message.name or _NAMELESS) + content
            case "assistant" if message.tool_calls:
                content = "\n\n".join(filter(None, (content, _rendered(message.tool_calls[0], by_name))))
        row: JsonObject = {"role": "user" if message.role == "tool" else message.role, "content": content}
        yield {**row, **present(reasoning_content=reasoning_with(message))}


def _rendered(call: ToolCall, tools: dict[str, JsonObject]) -> str:
    try:
        return render_call(call, tools.get(call.name))
    except RenderError as error:
        raise LeftOutError(str(error)) from error


def read_text_messages(
    messages: Sequence[Message], tools: Sequence[JsonObject] = ()
) -> tuple[list[Message], tuple[JsonObject, ...]]:
    """Messages with native calls, and the tools: those of the system prompt unless ``tools`` are given.

    A text that cannot be read as a call stays text, and so does everything where the results of calls have another
    form. Calls are numbered; their ids are not part of the text form.
    """
    out: list[Message] = []
    known, newlines = tuple(tools), Newlines.WRAPPED
    numbered = 0
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        content = message.content or ""
        if at == 0 and message.role == "system":
            prompt = read_system_prompt(content)
            known, newlines = known or prompt.tools, prompt.newlines
            out += [message.model_copy(update={"content": prompt.content})] if prompt.content else []
        elif message.role == "assistant" and not message.tool_calls:
            if open_calls:
                return list(messages), tuple(tools)
            read = read_answer(message, known, newlines, numbered)
            numbered += len(read.tool_calls)
            open_calls = {call.id for call in read.tool_calls if call.name != FINISH}
            out.append(read)
        elif message.role == "user" and (result := _read_result(content, out)) is not None:
            open_calls.discard(result.tool_call_id or "")
            out.append(result)
        else:
            # A tool's message says itself that it is a result.
            open_calls = set(list(open_calls)[1:]) if message.role == "tool" else open_calls
            out.append(message)
    return out, known


def read_answer(
    message: Message, tools: Sequence[JsonObject] = (), newlines: Newlines = Newlines.WRAPPED, numbered: int = 0
) -> Message:
    """The answer with the calls that stand in its text as calls, whose ids have numbers after ``numbered``; as it is
    where there are none, or one that cannot be read.
    """
    answer = read_function_text(message.content or "", tools, newlines)
    if answer.problems or not answer.calls:
        return message
    calls = tuple(
        call.model_copy(update={"id": f"toolu_{numbered + at:02d}"}) for at, call in enumerate(answer.calls, 1)
    )
    before = answer.before.removesuffix("\n\n")
    content = f"{before}\n\n{answer.after.strip()}" if answer.after.strip() else before
    return message.model_copy(update={"content": content or None, "tool_calls": calls})


def _read_result(content: str, before: Sequence[Message]) -> Message | None:
    """A result, when the last answer made a call of that name; other text of that look is the user's own."""
    asked = next((message for message in reversed(before) if message.role != "tool"), None)
    answered = {message.tool_call_id for message in before if message.role == "tool"}
    for call in asked.tool_calls if asked is not None else ():
        prefix = _RESULT.format(call.name)
        if content.startswith(prefix) and call.id not in answered:
            return Message(role="tool", content=content[len(prefix) :], tool_call_id=call.id, name=call.name)
    return None
