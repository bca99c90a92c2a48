"""The agent-data-protocol's standard form: ``content`` is a list of actions and observations with a ``class_``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from pydantic_core import to_json

from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.types import Message, ToolCall
from openhands_rl_plugin.trajectories.exchange.foreign import (
    UNKNOWN,
    ExchangeError,
    Imported,
    Record,
    RecordMessage,
    conversation,
    finished,
    is_context_only,
    linked_call,
    task_of,
    within,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format

_SHELLS = {"bash": "execute_bash", "sh": "execute_bash", "python": "execute_ipython_cell"}
_CODE = {"execute_bash": "command", "execute_ipython_cell": "code"}


def read(record: Record) -> Imported:
    """An episode of the agent-data-protocol. Raises ``ExchangeError`` that names the entry."""
    messages: list[RecordMessage] = []
    rewards: list[float | None] = []
    for number, event in enumerate(record.records("content")):
        with within(f"content[{number}]"):
            linked = linked_call(event.fields)
            message = _of_event(event, linked or f"call_{number}", _called(messages, linked))
            reasoning, context_only = event.read(str, "reasoning_content"), is_context_only(event.fields)
            messages.append(RecordMessage(**dict(message), reasoning=reasoning, context_only=context_only))
            rewards.append(event.read(float, "reward"))
    if not messages:
        raise ExchangeError("content: is empty")
    tree = conversation(messages)
    answer: int | None = None
    for at, reward in enumerate(rewards):
        answer = at if tree.nodes[at].sampled else answer
        if answer is not None and reward is not None:
            tree.nodes[answer].reward = (tree.nodes[answer].reward or 0.0) + reward
    details = record.read(dict, "details") or {}
    solved = details.get("resolved")
    return finished(
        tree,
        "agent-data-protocol",
        task_of(messages, UNKNOWN, record.read(str, "id")),
        evidence={"details": details} if details else {},
        reward=float(solved) if isinstance(solved, bool) else None,
    )


def _of_event(event: Record, identity: str, called: ToolCall | None) -> Message:
    """``called``: the call that an observation answers."""
    content, about = text_of(event.get("content")) or "", event.read(str, "description")
    match event.text("class_"):
        case "message_action":
            return Message(role="assistant", content=f"{about}\n\n{content}" if about else content)
        case "api_action":
            arguments = without_nulls(event.read(dict, "kwargs") or {})
            call = ToolCall(id=identity, name=event.text("function"), arguments=to_json(arguments).decode())
            return Message(role="assistant", content=about, tool_calls=(call,))
        case "code_action":
            language = event.text("language") or "bash"
            function = _SHELLS.get(language.lower(), "execute_code")
            arguments = {_CODE.get(function, "code"): content} | ({} if function in _CODE else {"language": language})
            call = ToolCall(id=identity, name=function, arguments=to_json(arguments).decode())
            return Message(role="assistant", content=about, tool_calls=(call,))
        case "text_observation" | "json_observation":
            pass
        case "web_observation":
            page, url = event.text("axtree", "html"), event.text("url")
            content = f"URL: {url}\n{page}" if url else page
        case "image_observation":
            content = "[image]"
        case other:
            raise ExchangeError(f"class_: {other!r} is no class of the protocol")
    if called is None:
        return Message(role="user", content=content)
    return Message(role="tool", content=content, tool_call_id=called.id, name=called.name)


def _called(before: Sequence[Message], linked: str | None) -> ToolCall | None:
    """The call that an observation answers: the one that it names, else the first open one of those made last."""
    named = [call for message in before for call in message.tool_calls if call.id == linked]
    answered = {message.tool_call_id for message in before if message.role == "tool"}
    recent = takewhile(lambda message: message.tool_calls or message.role == "tool", reversed(before))
    waiting = [call for message in recent for call in message.tool_calls if call.id not in answered]
    return next(iter(named[-1:] or waiting[-1:]), None)


FORMAT = Format(
    "agent-data-protocol",
    "standard form of the agent-data-protocol",
    lambda record, file: read(record),
    has=("content.class_",),
)
