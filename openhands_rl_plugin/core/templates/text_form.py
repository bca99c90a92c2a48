"""Conversations as text. SWE-Gym's form, which is OpenHands': calls and results are text, one call a turn, and the
system prompt describes the tools. And the interaction log about which SWE-Gym's outcome verifier is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Literal, NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_with
from openhands_rl_plugin.core.templates.parsing import RenderError, function_of, render_call
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall


def single_call_turns(messages: Sequence[Message]) -> list[Message]:
    """Split every message with several calls into one message a call, each followed by its own result.

    The text and the reasoning stand with the first of the calls. Raises ``RenderError`` where one of several calls got
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
                raise RenderError("several calls were made at once and some of them got no result")
            beside = {"content": None, **({"reasoning": None} if isinstance(message, SpokenMessage) else {})}
            split = message.model_copy(update={"tool_calls": (call,), **(beside if number else {})})
            out += [split, results[call.id]]
    return out


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
    described = (_describe(number, function_of(tool)) for number, tool in enumerate(tools, 1))
    return f"{content}{_HEAD}{'\n'.join(described)}{_TAIL}" if tools else content


def _describe(number: int, function: JsonObject) -> str:
    schema, listed = function.get("parameters"), "No parameters are required for this function.\n"
    if isinstance(schema, dict):
        required, properties = schema.get("required") or (), schema.get("properties")
        parameters = enumerate(properties.items() if isinstance(properties, dict) else (), 1)
        lines = (
            f"  ({at}) {name} {_declared(info, isinstance(required, list | tuple) and name in required)}\n"
            for at, (name, info) in parameters
        )
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
    """Messages with at most one call each in the text form. Raises ``RenderError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    by_name = {function_of(tool).get("name"): tool for tool in tools}
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
            content = "\n\n".join(filter(None, (content, render_call(call, by_name.get(call.name)))))
        reasoning = reasoning_with(message)
        yield {"role": role, "content": content, **({} if reasoning is None else {"reasoning_content": reasoning})}


SYSTEM = """You are an expert judge evaluating AI assistant interactions. Your task is to determine if the assistant \
successfully resolved the user's request.

Key evaluation criteria:
1. Did the assistant complete the main task requested by the user?
2. Did the assistant handle all edge cases and requirements specified?
3. Were there any errors or issues in the final solution?
4. Did the assistant verify the solution works as intended?

Respond only with "<judgement>YES</judgement>" or "<judgement>NO</judgement>"."""
_USER = """Please evaluate the following interaction between an AI assistant and a user:

=== INTERACTION LOG ===
{log}
=== END INTERACTION ===

Based on the above interaction, did the assistant successfully resolve the user's initial request? Respond with YES \
or NO."""


_RULE = "-" * 100 + "\n"
_TITLES = {"tool": "TOOL EXECUTION RESULT"}


class LogSection(NamedTuple):
    """A part of a log, without the rule above it. The message after the system's is the instruction."""

    kind: Literal["system", "instruction", "turn"]
    text: str


def question(log: str) -> list[JsonObject]:
    """The two messages that ask for a judgement of an interaction log."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _USER.format(log=log)}]


def joined(sections: Sequence[LogSection]) -> str:
    """The log that consists of these sections; turns are counted in pairs of messages."""
    return "".join(section.text if section.kind == "system" else _RULE + section.text for section in sections) + _RULE


def log_sections(messages: Sequence[Message], tools: Sequence[JsonObject]) -> list[LogSection]:
    """The parts of the log in order: the system prompt, the instruction, and every other message."""
    sections: list[LogSection] = []
    if messages and messages[0].role == "system":
        text = f"*** System Message that describes the assistant's behavior ***\n{messages[0].content or ''}\n"
        sections.append(LogSection("system", text))
        messages = messages[1:]
    by_name = {function_of(tool).get("name"): tool for tool in tools}
    for at, message in enumerate(_user_merged(messages)):
        title = _TITLES.get(message.role, message.role.upper())
        text = f"*** Turn {at // 2 + 1} - {title} ***\n{message.content or ''}\n"
        for number, call in enumerate(message.tool_calls):
            text += f"### Tool Call {number}\n{_as_text(call, by_name)}\n"
        sections.append(LogSection("instruction" if at == 0 else "turn", text))
    return sections


def _user_merged(messages: Sequence[Message]) -> Iterator[Message]:
    for by_user, group in groupby(messages, key=lambda message: message.role == "user"):
        if by_user:
            yield Message(role="user", content="\n".join(message.content or "" for message in group))
        else:
            yield from group


def _as_text(call: ToolCall, tools: Mapping[JsonValue, JsonObject]) -> str:
    try:
        return render_call(call, tools.get(call.name))
    except RenderError:
        # The judge sees a call that could not be executed as it was written.
        return f"<function={call.name}>\n{call.arguments}\n</function>"
