"""Conversations in rows: OpenAI's chat messages with reasoning, arguments as objects or as text. In the text form of
OpenHands calls and results are text, one call a turn, and the system prompt describes the tools.

Chat templates differ in what they want. Those of Qwen2.5 and Llama 3.1 print a text once more as JSON, so that a model
would learn to quote its arguments; DeepSeek V3's takes text only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_of, reasoning_with, to_wire
from openhands_rl_plugin.core.templates.function_text import RenderError, render_call
from openhands_rl_plugin.core.types import JsonObject, Message, Trajectory
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


def spoken_messages(trajectory: Trajectory, nodes: Sequence[int]) -> list[SpokenMessage]:
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
    return [wire_of(message) for message in spoken_messages(trajectory, path)]


def arguments_object(arguments: str) -> JsonObject | None:
    """The arguments of a call as an object; ``None`` when the text is none."""
    try:
        value = from_text(arguments or "{}")
    except ExchangeError:
        return None
    return value if isinstance(value, dict) else None


def with_objects(row: JsonObject) -> JsonObject:
    """The row with the arguments of all calls as objects, changed in place; a malformed text stays as it is."""
    listed: list[Any] = [each for column in row.values() if isinstance(column, list) for each in column]
    for message in listed:
        for call in (isinstance(message, dict) and message.get("tool_calls")) or ():
            known = arguments_object(call["function"][_ARGUMENTS])
            call["function"] |= {} if known is None else {_ARGUMENTS: known}
    return row


def as_text(kind: Any) -> Any:
    """Columns for rows whose arguments are text."""
    if isinstance(kind, Mapping):
        return {name: "string" if name == _ARGUMENTS else as_text(inner) for name, inner in kind.items()}
    return [as_text(each) for each in kind] if isinstance(kind, list) else kind


def single_call_turns(messages: Sequence[Message]) -> list[Message]:
    """Split every message with several calls into one message a call, each followed by its own result.

    The text and the reasoning stand with the first of the calls. Raises ``LeftOutError`` where one of several calls got
    no result: between two others it cannot stand.
    """
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        following = [*takewhile(lambda each: each.role == "tool", messages[at:])]
        results, at = {each.tool_call_id: each for each in following}, at + len(following)
        for number, call in enumerate(message.tool_calls):
            if call.id not in results:
                raise LeftOutError("several calls were made at once and some of them got no result")
            beside = {"content": None, **({"reasoning": None} if isinstance(message, SpokenMessage) else {})}
            split = message.model_copy(update={"tool_calls": (call,), **(beside if number else {})})
            out += [split, results[call.id]]
    return out


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
_NO_DESCRIPTION = "No description provided"


def system_prompt(content: str, tools: Sequence[JsonObject]) -> str:
    """``content`` with the description of the tools and the rules of the text form; itself without tools."""
    described = (_describe(number, object_at(tool, "function")) for number, tool in enumerate(tools, 1))
    return f"{content}{_HEAD}{'\n'.join(described)}{_TAIL}" if tools else content


def _describe(number: int, function: JsonObject) -> str:
    schema, listed = function.get("parameters"), "No parameters are required for this function.\n"
    if isinstance(schema, dict):
        required = at_path(schema, "required") or []
        parameters = enumerate(object_at(schema, "properties").items(), 1)
        lines = (f"  ({at}) {name} {_declared(info, name in required)}\n" for at, (name, info) in parameters)
        listed = f"Parameters:\n{''.join(lines)}"
    name, about = function.get("name", ""), function.get("description", "")
    begin = f"---- BEGIN FUNCTION #{number}: {name} ----\nDescription: {about}\n"
    return f"{begin}{listed}---- END FUNCTION #{number} ----\n"


def _declared(info: JsonValue, required: bool) -> str:
    known = info if isinstance(info, dict) else {}
    allowed, status = known.get("enum"), "required" if required else "optional"
    values = ", ".join(f"`{value}`" for value in allowed) if isinstance(allowed, list) else None
    suffix = "" if values is None else f"\nAllowed values: [{values}]"
    return f"({known.get('type', 'string')}, {status}): {known.get('description', _NO_DESCRIPTION)}{suffix}"


def text_messages(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Messages with at most one call each in the text form. Raises ``LeftOutError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    by_name = {str(at_path(tool, "function", "name")): tool for tool in tools}
    names: dict[str | None, str] = {}
    for at, message in enumerate(messages):
        content, role = message.content or "", message.role
        if role == "system" and at == 0:
            content = system_prompt(content, tools)
        elif role == "tool":
            name = message.name or names.get(message.tool_call_id, "function")
            content, role = f"EXECUTION RESULT of [{name}]:\n{content}", "user"
        for call in message.tool_calls:
            names[call.id] = call.name
            try:
                content = "\n\n".join(filter(None, (content, render_call(call, by_name.get(call.name)))))
            except RenderError as error:
                raise LeftOutError(str(error)) from error
        yield {"role": role, "content": content, **present(reasoning_content=reasoning_with(message))}
