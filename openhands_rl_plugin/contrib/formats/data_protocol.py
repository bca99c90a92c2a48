"""The agent-data-protocol's standard form: ``content`` is a list of actions and observations, told by ``class_``."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.trajectories.exchange.episodes import (
    UNKNOWN,
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    reward_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Foreign, parse, without_nulls
from openhands_rl_plugin.trajectories.exchange.formats import Format

NAME = "agent-data-protocol"
_SHELLS = {"bash": "execute_bash", "sh": "execute_bash", "python": "execute_ipython_cell"}
_CODE = {"execute_bash": "command", "execute_ipython_cell": "code"}


class ProtocolEvent(Foreign):
    """An action or an observation; fields of other classes are absent."""

    class_: str
    source: str = ""
    content: str = ""
    name: str | None = None
    function: str = ""
    kwargs: JsonObject = Field(default_factory=dict)
    language: str = "bash"
    description: str | None = None
    url: str | None = None
    axtree: str | None = None
    html: str | None = None


class ProtocolRecord(Foreign):
    """One trajectory."""

    id: str
    content: tuple[JsonObject, ...]
    details: JsonObject = Field(default_factory=dict)


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By the classes of its content."""
    listed = row.get("content")
    return isinstance(listed, list) and bool(listed) and isinstance(listed[0], dict) and "class_" in listed[0]


def read(row: JsonObject) -> Imported:
    """An episode of a trajectory. Raises ``ExchangeError`` that names the entry."""
    record = parse(ProtocolRecord, row)
    messages: list[Message] = []
    pending: list[ToolCall] = []
    for number, each in enumerate(record.content):
        try:
            messages.append(_message(parse(ProtocolEvent, without_nulls(each)), number, pending))
        except ExchangeError as error:
            raise ExchangeError(f"content[{number}]: {error}") from error
    asked = next((message.content for message in messages if message.role == "user"), None)
    solved = record.details.get("resolved")
    known = solved if isinstance(solved, bool) else None
    origin = Origin(NAME, Task(id=record.id, environment=UNKNOWN, instruction=asked or ""))
    evidence: JsonObject = {"details": record.details} if record.details else {}
    tree = conversation(messages, origin.policy)
    return finished(tree, origin, Ending(end_of(messages), evidence, reward_of(known)))


def _message(event: ProtocolEvent, number: int, pending: list[ToolCall]) -> Message:
    match event.class_:
        case "message_action":
            return Message(role="assistant", content=_with(event.description, event.content))
        case "api_action":
            return _called(event, number, event.function, event.kwargs, pending)
        case "code_action":
            function = _SHELLS.get(event.language.lower(), "execute_code")
            arguments: JsonObject = {_CODE.get(function, "code"): event.content}
            arguments |= {} if function in _CODE else {"language": event.language}
            return _called(event, number, function, arguments, pending)
        case "text_observation":
            if event.source == "user":
                return Message(role="user", content=event.content)
            return _observed(event.content, pending)
        case "web_observation":
            page = event.axtree or event.html or ""
            return _observed(f"URL: {event.url}\n{page}" if event.url else page, pending)
        case "image_observation":
            return _observed("[image]", pending)
        case "json_observation":
            return _observed(event.content, pending)
        case _:
            raise ExchangeError(f"class_: {event.class_!r} is no class of the protocol")


def _called(
    event: ProtocolEvent, number: int, function: str, arguments: JsonObject, pending: list[ToolCall]
) -> Message:
    call = ToolCall(id=f"call_{number}", name=function, arguments=to_json(arguments).decode())
    pending[:] = [call]
    return Message(role="assistant", content=event.description, tool_calls=(call,))


def _observed(text: str, pending: list[ToolCall]) -> Message:
    """The result of the last call, or what the environment said before any."""
    if not pending:
        return Message(role="user", content=text)
    call = pending.pop()
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


def _with(thought: str | None, said: str) -> str:
    return f"{thought}\n\n{said}" if thought else said


FORMAT = Format(NAME, "standard form of the agent-data-protocol", lambda row, file: read(row), recognises=recognises)
