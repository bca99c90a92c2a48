"""The agent-data-protocol's standard form: ``content`` is a list of actions and observations, told by ``class_``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.trajectories.exchange.episodes import (
    UNKNOWN,
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    reward_of,
    task_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Finite,
    Foreign,
    Said,
    is_context_only,
    linked_call,
    parse,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format

NAME = "agent-data-protocol"
_SHELLS = {"bash": "execute_bash", "sh": "execute_bash", "python": "execute_ipython_cell"}
_CODE = {"execute_bash": "command", "execute_ipython_cell": "code"}


class ProtocolEvent(Foreign):
    """An action or an observation; fields of other classes are absent."""

    class_: str
    source: str = ""
    content: JsonValue = ""
    function: str = ""
    kwargs: JsonObject = Field(default_factory=dict)
    language: str = "bash"
    description: str | None = None
    reasoning_content: str | None = None
    reward: Finite | None = None
    url: str | None = None
    axtree: str | None = None
    html: str | None = None

    @property
    def text(self) -> str:
        """Its content; an object as JSON."""
        return text_of(self.content) or ""


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
    rewards: list[float | None] = []
    for number, each in enumerate(record.content):
        try:
            event = parse(ProtocolEvent, {**each, "kwargs": without_nulls(each.get("kwargs"))})
            linked = linked_call(each)
            message = _message(event, linked or f"call_{number}", _result_of(messages, linked))
            messages.append(
                Said(**dict(message), reasoning=event.reasoning_content, context_only=is_context_only(each))
            )
            rewards.append(event.reward)
        except (ExchangeError, ValueError) as error:
            raise ExchangeError(f"content[{number}]: {error}") from error
    solved = record.details.get("resolved")
    known = solved if isinstance(solved, bool) else None
    origin = Origin(NAME, task_of(messages, UNKNOWN, record.id))
    evidence: JsonObject = {"details": record.details} if record.details else {}
    tree = conversation(messages, origin.policy)
    answer: int | None = None
    for at, reward in enumerate(rewards):
        answer = at if tree.nodes[at].sampled else answer
        if answer is not None and reward is not None:
            tree.nodes[answer].reward = _sum(tree.nodes[answer].reward, reward)
    return finished(tree, origin, Ending(end_of(messages), evidence, reward_of(known)))


def _message(event: ProtocolEvent, identity: str, called: ToolCall | None) -> Message:
    """``called``: the call that an observation answers."""
    match event.class_:
        case "message_action":
            said = f"{event.description}\n\n{event.text}" if event.description else event.text
            return Message(role="assistant", content=said)
        case "api_action":
            return _calling(event, ToolCall(id=identity, name=event.function, arguments=to_json(event.kwargs).decode()))
        case "code_action":
            function = _SHELLS.get(event.language.lower(), "execute_code")
            arguments: JsonObject = {_CODE.get(function, "code"): event.text}
            arguments |= {} if function in _CODE else {"language": event.language}
            return _calling(event, ToolCall(id=identity, name=function, arguments=to_json(arguments).decode()))
        case "text_observation" | "json_observation":
            told = event.text
        case "web_observation":
            page = event.axtree or event.html or ""
            told = f"URL: {event.url}\n{page}" if event.url else page
        case "image_observation":
            told = "[image]"
        case _:
            raise ExchangeError(f"class_: {event.class_!r} is no class of the protocol")
    if called is None:
        return Message(role="user", content=told)
    return Message(role="tool", content=told, tool_call_id=called.id, name=called.name)


def _sum(one: float | None, other: float | None) -> float | None:
    known = [each for each in (one, other) if each is not None]
    return sum(known) if known else None


def _calling(event: ProtocolEvent, call: ToolCall) -> Message:
    return Message(role="assistant", content=event.description, tool_calls=(call,))


def _result_of(before: Sequence[Message], linked: str | None) -> ToolCall | None:
    """The call that an observation answers: the one that it names, else the first open one of those made last."""
    named = [call for message in before for call in message.tool_calls if call.id == linked]
    told = {message.tool_call_id for message in before if message.role == "tool"}
    recent = takewhile(lambda message: message.tool_calls or message.role == "tool", reversed(before))
    waiting = [call for message in recent for call in message.tool_calls if call.id not in told]
    return next(iter(named[-1:] or waiting[-1:]), None)


FORMAT = Format(NAME, "standard form of the agent-data-protocol", lambda row, file: read(row), recognises=recognises)
