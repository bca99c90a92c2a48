"""The conversation in the events of OpenHands' V1 SDK.

Answers and calls are exact; observations are worded as the SDK words them for the model. Events of newer SDKs name the
one before them, so a conversation that was taken up again elsewhere becomes a branch; so does one that goes on from a
condenser's summary. Not in the events, and so lost: the parameters of the tools, and the prompts of summaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.acted import ACTED
from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.reasoning import reasoning_in
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import JsonObject, Message, PolicyRef, Times, ToolCall
from openhands_rl_plugin.trajectories.exchange.dates import seconds_of
from openhands_rl_plugin.trajectories.exchange.episodes import UNKNOWN_TIMES, say
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Foreign,
    WireFunction,
    WireMessage,
    parse,
    without_nulls,
)

_ERROR_HEADER = "[An error occurred during execution.]\n"
_RESULTS = {"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
_SAID = _RESULTS | {"SystemPromptEvent", "MessageEvent", "ActionEvent"}


class Text(Foreign):
    """A part of a message."""

    type: str = "text"
    text: str = ""


class V1Call(Foreign):
    """The call as the model wrote it; the first SDKs had name and arguments in a ``function``, as OpenAI has."""

    id: str = ""
    name: str = ""
    arguments: str = "{}"
    function: WireFunction | None = None

    def as_tool_call(self, event: V1Event) -> ToolCall:
        """As a call of ours; missing fields are taken from the event."""
        said = self.function or self
        return ToolCall(id=self.id or event.tool_call_id, name=said.name or event.tool_name, arguments=said.arguments)


class V1Event(Foreign):
    """One event of any kind; fields of other kinds are absent."""

    id: str = ""
    kind: str = ""
    timestamp: str | None = None
    source: str = ""
    parent_id: str | None = None
    system_prompt: Text | None = None
    dynamic_context: Text | None = None
    tools: tuple[JsonObject, ...] = ()
    llm_message: JsonObject | None = None
    extended_content: tuple[Text, ...] = ()
    thought: tuple[Text, ...] = ()
    reasoning_content: str | None = None
    thinking_blocks: tuple[JsonObject, ...] = ()

    @property
    def reasoning(self) -> str | None:
        """Of an answer, in either form."""
        return self.reasoning_content or reasoning_in({"thinking_blocks": self.thinking_blocks})

    tool_name: str = ""
    tool_call_id: str = ""
    tool_call: V1Call | None = None
    llm_response_id: str | None = None
    observation: JsonObject | None = None
    rejection_reason: str = ""
    error: str = ""
    code: str = ""
    detail: str = ""
    forgotten_event_ids: tuple[str, ...] = ()
    summary: str | None = None
    summary_offset: int | None = None


class Log(NamedTuple):
    """A conversation as it was logged. ``errors`` are those that ended it, as (code, detail)."""

    tree: EpisodeTree
    times: Times
    errors: tuple[tuple[str, str], ...]
    condensations: int


def read_log(events: Sequence[JsonValue], policy: PolicyRef, leaf: str | None = None) -> Log:
    """All events in order; ``leaf`` is the event at which the conversation stands, by default the last one.

    Raises ``ExchangeError`` that names the event.
    """
    reader = _Reader(policy)
    parsed: list[V1Event] = []
    for number, each in enumerate(events):
        try:
            parsed.append(parse(V1Event, each))
            reader.take(parsed[-1])
        except ExchangeError as error:
            raise ExchangeError(f"event {number}: {error}") from error
    if leaf is not None and leaf in reader.places:
        reader.tree.head = reader.places[leaf]
    errors = tuple((event.code, event.detail) for event in parsed if event.kind == "ConversationErrorEvent")
    condensations = sum(event.kind == "Condensation" for event in parsed)
    return Log(reader.tree, _times(parsed), errors, condensations)


class _Reader:
    def __init__(self, policy: PolicyRef) -> None:
        self.tree = EpisodeTree()
        self.places: dict[str, int | None] = {}
        self._policy = policy
        self._answers: dict[str, int] = {}
        # Node -> the events that it was read from.
        self._events: dict[int, tuple[str, ...]] = {}

    def take(self, event: V1Event) -> None:
        """Add the event's message below the event that it names, or below the last one."""
        if event.parent_id is not None and event.parent_id in self.places:
            self.tree.head = self.places[event.parent_id]
        match event.kind:
            case "SystemPromptEvent":
                self.tree.tools = self.tree.tools or tuple(read_tool(tool) for tool in event.tools)
                say(self.tree, Message(role="system", content=_system(event)), None)
            case "MessageEvent":
                self._add_message(event)
            case "ActionEvent":
                self._add_action(event)
            case kind if kind in _RESULTS:
                content = _join([*_result(event), *(part.text for part in event.extended_content)])
                result = Message(
                    role="tool", content=content, tool_call_id=event.tool_call_id, name=event.tool_name or None
                )
                say(self.tree, result, None)
            case "Condensation":
                self._condense(event)
            case _:
                pass
        head = self.places[event.id] = self.tree.head
        if head is not None and event.kind in _SAID:
            self._events[head] = (*self._events.get(head, ()), event.id)

    def _condense(self, event: V1Event) -> None:
        """Go on as the SDK does: without the events that are forgotten, and with the summary in their place."""
        forgotten, path = {*event.forgotten_event_ids}, self.tree.path()
        kept = [at for at in path if not self._events.get(at) or not forgotten.issuperset(self._events[at])]
        same = next(
            (number for number, (old, new) in enumerate(zip(path, kept, strict=False)) if old != new), len(kept)
        )
        if event.summary is not None and event.summary_offset is not None:
            same = min(same, self._first_at(kept, event.summary_offset))
        before = sum(len(self._events.get(at, ())) for at in kept[:same])
        for at in path[same:]:
            if self.tree.nodes[at].sampled:
                self.tree.nodes[at].metadata[ACTED] = True
        self.tree.head = kept[same - 1] if same else None
        untold = event.summary is not None and event.summary_offset is not None
        for at in (*kept[same:], None):
            if untold and (at is None or before >= (event.summary_offset or 0)):
                untold = False
                self._say_again(Message(role="user", content=event.summary), (f"{event.id}-summary",))
            if at is not None:
                before += len(self._events.get(at, ()))
                self._say_again(self.tree.nodes[at].message, self._events.get(at, ()))

    def _first_at(self, kept: Sequence[int], offset: int) -> int:
        """How many of the nodes stand before so many events."""
        ends = accumulate(len(self._events.get(at, ())) for at in kept)
        return sum(end <= offset for end in ends)

    def _say_again(self, message: Message, events: tuple[str, ...]) -> None:
        self.tree.head = self.tree.append(message)
        self._events[self.tree.head] = events

    def _add_message(self, event: V1Event) -> None:
        wire = parse(WireMessage, _as_wire(event.llm_message or {}))
        message = wire.message()
        if event.extended_content:
            added = [part.text for part in event.extended_content]
            message = message.model_copy(update={"content": _join([message.content or "", *added])})
        known = self._answers.get(event.llm_response_id or "")
        sampled = message.role == "assistant" and known is None
        at = say(self.tree, message, self._policy if sampled else None, _reasoning(wire.reasoning_content))
        if sampled and event.llm_response_id:
            self._answers[event.llm_response_id] = at

    def _add_action(self, event: V1Event) -> None:
        if event.tool_call is None:
            raise ExchangeError("tool_call: is required")
        call = event.tool_call.as_tool_call(event)
        known = self._answers.get(event.llm_response_id or "")
        if known is not None and known in self.tree.path():
            # Each call of a response is an event of its own.
            node = self.tree.nodes[known]
            node.message = node.message.model_copy(update={"tool_calls": (*node.message.tool_calls, call)})
            return
        message = Message(role="assistant", content=_join(part.text for part in event.thought), tool_calls=(call,))
        # An answer that was forgotten and is said again was sampled once.
        at = say(self.tree, message, self._policy if known is None else None, _reasoning(event.reasoning))
        if event.llm_response_id:
            self._answers[event.llm_response_id] = at


def _system(event: V1Event) -> str:
    parts = (event.system_prompt, event.dynamic_context)
    return _join(part.text for part in parts if part is not None) or ""


def _result(event: V1Event) -> list[str]:
    if event.kind == "AgentErrorEvent":
        return [event.error]
    if event.kind == "UserRejectObservation":
        return [f"Action rejected: {event.rejection_reason}"]
    observation = event.observation or {}
    text = text_of(_parts(observation.get("content"))) or ""
    header = [_ERROR_HEADER] if observation.get("is_error") else []
    metadata = observation.get("metadata")
    return [*header, _shell_result(text, metadata) if isinstance(metadata, dict) else text]


def _shell_result(text: str, metadata: JsonObject) -> str:
    text = f"{metadata.get('prefix') or ''}{text}{metadata.get('suffix') or ''}"
    if metadata.get("working_dir"):
        text += f"\n[Current working directory: {metadata['working_dir']}]"
    if metadata.get("py_interpreter_path"):
        text += f"\n[Python interpreter: {metadata['py_interpreter_path']}]"
    if metadata.get("exit_code") not in (None, -1):
        text += f"\n[Command finished with exit code {metadata['exit_code']}]"
    return text


def read_tool(given: JsonObject) -> JsonObject:
    """A logged tool as an OpenAI tool; its name is that of its class, and its parameters only MCP tools have."""
    tool = without_nulls(given)
    if "function" in tool:
        return tool
    mcp = tool.get("mcp_tool")
    held = mcp if isinstance(mcp, dict) else {}
    kind = str(tool.get("kind", ""))
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower().removesuffix("_tool")
    function: JsonObject = {"name": str(held.get("name") or tool.get("name") or snake)}
    function |= {"description": tool["description"]} if "description" in tool else {}
    function |= {"parameters": held["inputSchema"]} if "inputSchema" in held else {}
    return {"type": "function", "function": function}


def _as_wire(message: JsonObject) -> JsonObject:
    """The SDK's calls have name and arguments beside their id."""
    message = {**message, "content": _parts(message.get("content"))}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    nested = [{**call, "function": call.get("function") or call} if isinstance(call, dict) else call for call in calls]
    return {**message, "tool_calls": nested}


def _parts(content: JsonValue) -> JsonValue:
    """The SDK's images as the model is sent them: a part each."""
    if not isinstance(content, list):
        return content
    parts: list[JsonValue] = []
    for part in content:
        urls = part.get("image_urls") if isinstance(part, dict) else None
        if isinstance(urls, list):
            parts.extend({"type": "image_url"} for _ in urls)
        else:
            parts.append(part)
    return parts


def _reasoning(text: str | None) -> JsonObject:
    return {"reasoning_content": text} if text else {}


def _join(parts: Iterable[str]) -> str | None:
    texts = [part for part in parts if part]
    return "\n".join(texts) or None


def _times(events: Sequence[V1Event]) -> Times:
    seconds = []
    for event in events:
        with suppress(ValueError):
            seconds.append(seconds_of(datetime.fromisoformat(event.timestamp or "")))
    return Times(started=min(seconds), finished=max(seconds)) if seconds else UNKNOWN_TIMES
