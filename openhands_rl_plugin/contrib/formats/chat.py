"""Rows of chats: ShareGPT's ``conversations``, with calls as LLaMA-Factory writes them, and TRL's ``prompt`` with
``completion`` (and ``label``), or ``chosen`` and ``rejected``; texts or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from pydantic import JsonValue

from openhands_rl_plugin.core.types import Message
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Imported,
    Record,
    chat_message,
    chat_messages,
    from_text,
    row_episode,
    within,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
_ENVIRONMENT = "chat"
_PROMPTS = ("question", "query", "instruction", "input")


def read_sharegpt(record: Record) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    messages: list[Message] = []
    for number, each in enumerate(record.records("conversations")):
        speaker = each.text("from").lower()
        if (role := _ROLES.get(speaker)) is None:
            raise ExchangeError(f"conversations[{number}].from: {speaker!r} is not one of {', '.join(_ROLES)}")
        turn: Message = chat_message({**each.fields, "role": role, "content": each.get("value")})
        if speaker == "function_call":
            # One call or a list of them, as JSON.
            calls = from_text(turn.content or "")
            wire = {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls]}
            turn = turn.model_copy(update={"content": None, "tool_calls": chat_message(wire).tool_calls})
            if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
                turn = messages.pop().model_copy(update={"tool_calls": turn.tool_calls})
        messages.append(turn)
    return row_episode(record, "sharegpt", messages, environment=_ENVIRONMENT)


def read_trl(record: Record) -> list[Imported]:
    """The episodes of a row: one, or the chosen and the rejected one, of one task with rewards 1 and 0.

    Raises ``ExchangeError``.
    """
    better: Any = record.get("chosen")
    worse: Any = record.get("rejected")
    if better is None or worse is None:
        answer, label = _messages(record.get("completion"), "completion", "assistant"), record.read(bool, "label")
        reward = None if label is None else float(label)
        return [_answered(record, _messages(record.get("prompt"), "prompt", "user"), answer, reward)]
    texts = (record.get(name) for name in _PROMPTS)
    asked: Any = record.get("prompt") or "\n".join(text for text in texts if isinstance(text, str) and text)
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
    return [_answered(record, prompt, chosen, 1.0), _answered(record, prompt, rejected, 0.0)]


def _answered(record: Record, prompt: Sequence[Message], answer: Sequence[Message], reward: float | None) -> Imported:
    return row_episode(record, "trl", answer, prompt, environment=_ENVIRONMENT, reward=reward)


def _shared[Each](one: Sequence[Each], other: Sequence[Each]) -> list[Each]:
    """The longest common prefix."""
    return [each for each, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def _messages(value: JsonValue, name: str, role: Any) -> Sequence[Message]:
    """Messages, or one of ``role`` with the text. Raises ``ExchangeError``."""
    if value is None or isinstance(value, str):
        return [Message(role=role, content=value)] if value else []
    with within(name):
        return chat_messages(value)


SHAREGPT = Format(
    "sharegpt",
    "ShareGPT's conversations",
    lambda record, file: read_sharegpt(record),
    has=("conversations.from conversations.value",),
)
TRL = Format(
    "trl",
    "TRL's prompt with completion, or chosen and rejected",
    lambda record, file: read_trl(record),
    has=("chosen rejected", "prompt completion"),
)
