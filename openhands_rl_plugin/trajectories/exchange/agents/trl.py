"""Rows of TRL: ``prompt`` with ``completion`` (and ``label``), or ``chosen`` and ``rejected``; texts or messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from pydantic import JsonValue

from openhands_rl_plugin.core.types import JsonObject, Message, Task
from openhands_rl_plugin.trajectories.exchange.episodes import (
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    reward_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Foreign,
    WireMessage,
    messages_of,
    parse,
    tools_of,
)

NAME = "trl"
ENVIRONMENT = "chat"


class TrlRecord(Foreign):
    """One row. ``label`` is KTO's: whether the completion is wanted."""

    prompt: JsonValue = None
    completion: JsonValue = None
    chosen: JsonValue = None
    rejected: JsonValue = None
    label: bool | None = None
    tools: JsonValue = None
    id: str | None = None
    instance_id: str | None = None
    model: str | None = None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """A completion of a prompt, or two to choose from."""
    texts = all(isinstance(row.get(name), str | list) for name in ("chosen", "rejected"))
    return texts or ("prompt" in row and isinstance(row.get("completion"), str | list))


def read(row: JsonObject) -> list[Imported]:
    """The episodes of a row: one, or the chosen and the rejected one, of one task with rewards 1 and 0.

    Raises ``ExchangeError``.
    """
    record = parse(TrlRecord, row)
    if record.chosen is None or record.rejected is None:
        if record.completion is None:
            raise ExchangeError("completion: is required, or chosen and rejected")
        answer = _messages(record.completion, "completion", "assistant")
        return [_episode(record, _messages(record.prompt, "prompt", "user"), answer, record.label)]
    chosen = _messages(record.chosen, "chosen", "assistant")
    rejected = _messages(record.rejected, "rejected", "assistant")
    prompt = _messages(record.prompt, "prompt", "user")
    if not prompt:
        # An implicit prompt is what both begin with.
        same = zip(chosen, rejected, strict=False)
        prompt = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], same)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return [_episode(record, prompt, chosen, True), _episode(record, prompt, rejected, False)]


def _episode(record: TrlRecord, prompt: list[Message], answer: list[Message], wanted: bool | None) -> Imported:
    messages = [*prompt, *answer]
    if not any(message.role == "assistant" for message in answer):
        raise ExchangeError("there is no answer in it")
    asked = next((message.content for message in prompt if message.role == "user"), None) or ""
    text = "\0".join(message.model_dump_json() for message in prompt)
    name = record.instance_id or record.id or hashlib.sha256(text.encode()).hexdigest()[:16]
    origin = Origin(NAME, Task(id=name, environment=ENVIRONMENT, instruction=asked), record.model)
    tree = conversation(messages, origin.policy, tools_of(record.tools), given=len(prompt))
    return finished(tree, origin, Ending(end_of(messages), {}, reward_of(wanted)))


def _messages(value: JsonValue, name: str, role: Any) -> list[Message]:
    """Messages, or one of ``role`` with the text. Raises ``ExchangeError``."""
    if value is None or isinstance(value, str):
        return [Message(role=role, content=value)] if value else []
    if not isinstance(value, list):
        raise ExchangeError(f"{name}: must be a text or a list of messages")
    return messages_of([parse(WireMessage, each) for each in value])
