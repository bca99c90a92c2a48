"""ShareGPT rows: ``conversations`` of ``from`` and ``value``, with calls as LLaMA-Factory writes them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from openhands_rl_plugin.core.reasoning import SpokenMessage
from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.trajectories.exchange.episodes import (
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    named_identity,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Foreign,
    WireFunction,
    from_text,
    parse,
    tools_of,
)

NAME = "sharegpt"
ENVIRONMENT = "chat"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "call",
}


class ShareGptTurn(Foreign):
    """One message."""

    role: str
    text: str = ""
    reasoning_content: str | None = None


class ShareGptRecord(Foreign):
    """One row."""

    conversations: tuple[JsonObject, ...]
    id: str = ""
    system: str | None = None
    tools: JsonValue = None
    model: str | None = None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """AgentGym's rows are the ones with ``item_id``."""
    listed = row.get("conversations")
    first = listed[0] if isinstance(listed, list) and listed else None
    return isinstance(first, dict) and "from" in first and "value" in first and "item_id" not in row


def read(row: JsonObject) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    record = parse(ShareGptRecord, row)
    messages: list[Message] = [Message(role="system", content=record.system)] if record.system else []
    pending: list[ToolCall] = []
    for number, each in enumerate(record.conversations):
        turn = parse(ShareGptTurn, {**each, "role": each.get("from"), "text": each.get("value")})
        role = _ROLES.get(turn.role.lower())
        if role is None:
            raise ExchangeError(f"conversations[{number}].from: {turn.role!r} is not one of {', '.join(_ROLES)}")
        if role == "call":
            pending = _calls(turn.text, len(messages))
            said = messages[-1] if messages and messages[-1].role == "assistant" else None
            if said is not None and not said.tool_calls:
                messages[-1] = said.model_copy(update={"tool_calls": tuple(pending)})
            else:
                messages.append(Message(role="assistant", tool_calls=tuple(pending)))
        elif role == "tool" and pending:
            call = pending.pop(0)
            messages.append(Message(role="tool", content=turn.text, tool_call_id=call.id, name=call.name))
        else:
            messages.append(
                SpokenMessage.model_validate({"role": role, "content": turn.text, "reasoning": turn.reasoning_content})
            )
    if not messages:
        raise ExchangeError("conversations: is empty")
    asked = next((message.content for message in messages if message.role == "user"), None) or ""
    name = record.id or named_identity(NAME, asked)
    origin = Origin(NAME, Task(id=name, environment=ENVIRONMENT, instruction=asked), record.model)
    tree = conversation(messages, origin.policy, _tools(record.tools))
    return finished(tree, origin, Ending(end_of(messages), {}))


def _calls(text: str, at: int) -> list[ToolCall]:
    """One call or a list of them, as JSON. Raises ``ExchangeError``."""
    value = from_text(text)
    listed = value if isinstance(value, list) else [value]
    calls = [parse(WireFunction, each) for each in listed]
    return [
        ToolCall(id=f"call_{at}_{number}", name=call.name, arguments=call.arguments)
        for number, call in enumerate(calls, 1)
    ]


def _tools(value: JsonValue) -> tuple[JsonObject, ...]:
    """OpenAI tools, or the functions alone, as a list or as JSON."""
    listed = from_text(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(listed, list):
        return tools_of(listed)
    wrapped: list[JsonValue] = [
        {"type": "function", "function": each} if isinstance(each, dict) and "function" not in each else each
        for each in listed
    ]
    return tools_of(wrapped)
