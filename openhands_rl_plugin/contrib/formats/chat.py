"""Rows of chats: ShareGPT's ``conversations``, with calls as LLaMA-Factory writes them, and TRL's ``prompt`` with
``completion`` (and ``label``), or ``chosen`` and ``rejected``; texts or messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from pydantic import JsonValue

from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.trajectories.exchange.episodes import (
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    task_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ChatRow,
    ExchangeError,
    chat_message,
    chat_messages,
    from_text,
    parse,
    tools_of,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format

_SHAREGPT = "sharegpt"
_ENVIRONMENT = "chat"
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


class ShareGptRecord(ChatRow):
    """One row."""

    conversations: tuple[JsonObject, ...]


def recognises_sharegpt(row: Mapping[str, JsonValue]) -> bool:
    """AgentGym's rows are the ones with ``item_id``."""
    listed = row.get("conversations")
    first = listed[0] if isinstance(listed, list) and listed else None
    return isinstance(first, dict) and "from" in first and "value" in first and "item_id" not in row


def read_sharegpt(row: JsonObject) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    record = parse(ShareGptRecord, row)
    messages: list[Message] = []
    for number, each in enumerate(record.conversations):
        speaker = str(each.get("from"))
        role = _ROLES.get(speaker.lower())
        if role is None:
            raise ExchangeError(f"conversations[{number}].from: {speaker!r} is not one of {', '.join(_ROLES)}")
        role, calls = ("assistant", True) if role == "call" else (role, False)
        turn = chat_message({**each, "role": role, "content": each.get("value")})
        if calls:
            turn = turn.model_copy(update={"content": None, "tool_calls": _calls(turn.content or "")})
            if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
                turn = messages.pop().model_copy(update={"tool_calls": turn.tool_calls})
        messages.append(turn)
    said = record.whole(messages)
    task = task_of(said, _ENVIRONMENT, record.instance_id, record.task_id, row=record.id)
    origin = Origin(_SHAREGPT, task, record.model)
    tree = conversation(said, origin.policy, tools_of(record.tools))
    return finished(tree, origin, Ending(end_of(said), {}, record.score))


def _calls(text: str) -> tuple[ToolCall, ...]:
    """One call or a list of them, as JSON. Raises ``ExchangeError``."""
    value = from_text(text)
    return chat_message({"role": "assistant", "tool_calls": value if isinstance(value, list) else [value]}).tool_calls


_TRL = "trl"
_PROMPTS = ("question", "query", "instruction", "input")


class TrlRecord(ChatRow):
    """One row. ``label`` is KTO's: whether the completion is wanted."""

    prompt: JsonValue = None
    completion: JsonValue = None
    chosen: JsonValue = None
    rejected: JsonValue = None
    label: bool | None = None


def recognises_trl(row: Mapping[str, JsonValue]) -> bool:
    """A completion of a prompt, or two to choose from."""
    texts = all(isinstance(row.get(name), str | list) for name in ("chosen", "rejected"))
    return texts or ("prompt" in row and isinstance(row.get("completion"), str | list))


def read_trl(row: JsonObject) -> list[Imported]:
    """The episodes of a row: one, or the chosen and the rejected one, of one task with rewards 1 and 0.

    Raises ``ExchangeError``.
    """
    record = parse(TrlRecord, row)
    if record.chosen is None or record.rejected is None:
        answer = _messages(record.completion, "completion", "assistant")
        reward = record.score if record.label is None else float(record.label)
        return [_episode(record, _messages(record.prompt, "prompt", "user"), answer, reward)]
    better, worse = record.chosen, record.rejected
    asked = record.prompt or "\n".join(text for name in _PROMPTS if isinstance(text := row.get(name), str) and text)
    if not asked and isinstance(better, str) and isinstance(worse, str):
        # An implicit prompt is what both begin with.
        asked = "".join(_shared(better, worse)).rpartition(" ")[0]
        better, worse = better.removeprefix(asked), worse.removeprefix(asked)
    prompt = _messages(asked, "prompt", "user")
    chosen, rejected = _messages(better, "chosen", "assistant"), _messages(worse, "rejected", "assistant")
    if not prompt or (isinstance(asked, str) and chosen and chosen[0].role != "assistant"):
        prompt = _shared(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt or chosen == rejected:
        raise ExchangeError("chosen and rejected: must be two answers to one prompt, or begin with it")
    return [_episode(record, prompt, chosen, 1.0), _episode(record, prompt, rejected, 0.0)]


def _shared[Each](one: Sequence[Each], other: Sequence[Each]) -> list[Each]:
    """What both begin with."""
    return [each for each, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def _episode(record: TrlRecord, prompt: Sequence[Message], answer: Sequence[Message], reward: float | None) -> Imported:
    messages = record.whole(answer, prompt)
    given = len(messages) - len(answer)
    task = task_of(messages, _ENVIRONMENT, record.instance_id, record.task_id, row=record.id, given=given)
    origin = Origin(_TRL, task, record.model)
    tree = conversation(messages, origin.policy, tools_of(record.tools), given=given)
    return finished(tree, origin, Ending(end_of(messages), {}, reward))


def _messages(value: JsonValue, name: str, role: Any) -> Sequence[Message]:
    """Messages, or one of ``role`` with the text. Raises ``ExchangeError``."""
    if value is None or isinstance(value, str):
        return [Message(role=role, content=value)] if value else []
    try:
        return chat_messages(value)
    except ExchangeError as error:
        raise ExchangeError(f"{name}: {error}") from error


SHAREGPT = Format(
    _SHAREGPT, "ShareGPT's conversations", lambda row, file: read_sharegpt(row), recognises=recognises_sharegpt
)
TRL = Format(
    _TRL,
    "TRL's prompt with completion, or chosen and rejected",
    lambda row, file: read_trl(row),
    recognises=recognises_trl,
)
