"""Trajectories of mini-swe-agent: version 1 (a list of messages, or an object with ``info``) and version 2.

Version 1 has commands in the text of answers. Version 2 has tool calls, or output of OpenAI's Responses API. The tools
that were offered are not in the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.types import JsonObject, Task, Times
from openhands_rl_plugin.trajectories.exchange.agents.exits import ending_of
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    UNKNOWN_TIMES,
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
)
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Foreign, WireMessage, messages_of, parse
from openhands_rl_plugin.trajectories.exchange.reading import CONVERSATION_FILE

NAME = "mini-swe-agent"
_EXIT = "exit"


class MiniModel(Foreign):
    """The part that names the model."""

    model_name: str | None = None


class MiniConfig(Foreign):
    """What the agent was run with, as far as it is needed."""

    model: MiniModel = MiniModel()


class MiniInfo(Foreign):
    """How it ended."""

    exit_status: str | None = None
    submission: str | None = None
    config: MiniConfig = Field(default_factory=MiniConfig)
    model_stats: JsonValue = None
    mini_version: str | None = None


class MiniRecord(Foreign):
    """A ``.traj.json``."""

    info: MiniInfo = Field(default_factory=MiniInfo)
    messages: tuple[JsonObject, ...]
    instance_id: str = ""


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By its name, or by ``info`` beside ``messages``."""
    called = str(row.get("trajectory_format", ""))
    named = called.startswith(NAME) or called == CONVERSATION_FILE
    info = row.get("info")
    known = isinstance(info, dict) and not {"exit_status", "submission", "mini_version"}.isdisjoint(info)
    return isinstance(row.get("messages"), list) and (named or known)


def read(row: JsonObject, file: Path | None = None) -> Imported:
    """An episode of a record. Raises ``ExchangeError``."""
    record = parse(MiniRecord, row)
    wire = [parse(WireMessage, each) for each in _flat(record.messages)]
    if not wire:
        raise ExchangeError("messages: is empty")
    name = record.instance_id or (file.name.partition(".")[0] if file is not None else "")
    messages = messages_of(wire)
    asked = next((message.content for message in messages if message.role == "user"), None)
    info = record.info
    origin = Origin(NAME, Task(id=name, environment=SWE, instruction=asked or ""), info.config.model.model_name)
    evidence: JsonObject = {} if info.submission is None else {"patch": info.submission}
    evidence |= {} if info.exit_status is None else {"exit_status": info.exit_status}
    evidence |= {} if info.model_stats is None else {"metrics": info.model_stats}
    stop, failure = ending_of(info.exit_status, end_of(messages), NAME)
    times = _times(record.messages)
    return finished(conversation(messages, origin.policy), origin, Ending(stop, evidence, failure=failure, times=times))


def _flat(messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Chat messages; the one that marks the exit is none."""
    for message in messages:
        if message.get("object") == "response":
            yield _of_response(message)
        elif message.get("type") == "function_call_output":
            yield {"role": "tool", "content": message.get("output"), "tool_call_id": message.get("call_id")}
        elif message.get("role") != _EXIT:
            yield message


def _of_response(response: JsonObject) -> JsonObject:
    """The output of OpenAI's Responses API as one chat message."""
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    texts = [part for item in items if item.get("type") == "message" for part in _parts(item.get("content"))]
    reasons = [part for item in items if item.get("type") == "reasoning" for part in _parts(item.get("summary"))]
    calls: list[JsonValue] = [
        {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        for item in items
        if item.get("type") == "function_call"
    ]
    return {
        "role": "assistant",
        "content": "\n".join(texts),
        "tool_calls": calls,
        "reasoning_content": "\n".join(reasons) or None,
    }


def _parts(value: JsonValue) -> list[str]:
    parts = value if isinstance(value, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]  # pyright: ignore[reportReturnType]


def _times(messages: Sequence[JsonObject]) -> Times:
    extras = [message.get("extra") for message in messages]
    stamps = [extra.get("timestamp") for extra in extras if isinstance(extra, dict)]
    seconds = [float(each) for each in stamps if isinstance(each, int | float)]
    return Times(started=min(seconds), finished=max(seconds)) if seconds else UNKNOWN_TIMES
