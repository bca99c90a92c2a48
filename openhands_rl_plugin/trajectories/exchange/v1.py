"""Stored conversations of OpenHands' V1 SDK, read and written: folders with an event a file, or a file of events.

Written, every call is an action event with the call as it was sampled, every result the observation of an MCP tool,
because that one carries any text. Tools are MCP tools with their parameters. A history that was rewritten is a
``Condensation``, as the SDK itself logs one: every answer that was acted on is an event, and the events of each prompt
are those that the model saw. Tokens, rewards and answers that were not acted on have no place in events.

Read, answers and calls are exact; observations are worded as the SDK words them for the model. Events of newer SDKs
name the one before them, so a conversation that was taken up again elsewhere becomes a branch; so does one that goes on
from a condenser's summary. Not in the events, and so lost: the parameters of the tools, and the prompts of summaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.records import SUB_AGENT, SubAgentOf, sub_agent_of, sub_agents_run
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    ACTED,
    Failure,
    FailureKind,
    JsonObject,
    Message,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Times,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.episodes import (
    UNKNOWN,
    Ending,
    Imported,
    Origin,
    date_of,
    end_of,
    finished,
    named_identity,
    say,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Foreign,
    LeftOutError,
    chat_message,
    parse,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.reading import Source, Unit, files_below, read_document, rows_of
from openhands_rl_plugin.trajectories.exchange.writing import safe_name

SUB_AGENT_STATE = "openhands_rl_sub_agent"
"""In the ``agent_state`` of a sub-agent's conversation: a ``SubAgentOf`` with the id of the parent's conversation."""

_STATUS = {StopReason.TERMINATED: "finished", StopReason.ERROR: "error"}


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[tuple[str, JsonObject]]:
    """A file for each event, and the state's, in the folders that the SDK stores a conversation in.

    Raises ``LeftOutError`` when nothing was said.
    """
    if not trajectory.path():
        raise LeftOutError("nothing was said in it")
    name = f"{safe_name(trajectory.task.id)}/{trajectory.id}"
    state: JsonObject = {
        "id": named_identity(trajectory.id),
        "agent": {"kind": "Agent", "llm": {"model": trajectory.policy.served_name}},
        "execution_status": _STATUS.get(trajectory.stop, "paused"),
    }
    if (link := sub_agent_of(trajectory.task)) is not None:
        state["agent_state"] = {SUB_AGENT_STATE: {"parent": named_identity(link.parent), "kind": link.kind}}
    yield f"{name}/base_state.json", state
    for number, event in enumerate(_dated(trajectory, _Writer(trajectory).events())):
        yield f"{name}/events/event-{number:05d}-{event['id']}.json", event


def _dated(trajectory: Trajectory, events: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """With times, from the episode's start to its end. No event names the one before: SDK 1.15 has no field for it."""
    times = trajectory.times
    step = (times.finished - times.started) / max(1, len(events) - 1)
    for number, event in enumerate(events):
        stamp = date_of(times.started + number * step).replace(tzinfo=None).isoformat()
        yield {**event, "timestamp": stamp}


class _Said(NamedTuple):
    """A message of the prompt, with the events that say it."""

    node: int
    events: tuple[str, ...]


_Key = tuple[str, str, str | None, tuple[tuple[str, str], ...]]


class _Writer:
    """Makes the events. ``_view`` is what the SDK would show the model after those so far."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._events: list[JsonObject] = []
        self._view: list[_Said] = []
        self._actions: dict[str, tuple[str, str]] = {}
        self._responses: dict[tuple[str, ...], str] = {}

    def events(self) -> list[JsonObject]:
        """Every answer that was acted on, each below the prompt that it answered."""
        for at in self._trajectory.acted():
            path = self._trajectory.path(at)
            self._follow(path[:-1])
            self._follow(path)
        self._follow(self._trajectory.path())
        return self._events

    def _follow(self, path: Sequence[int]) -> None:
        """Make the view that of ``path``."""
        pairs = takewhile(lambda pair: pair[0].node == pair[1], zip(self._view, path, strict=False))
        same = sum(1 for _ in pairs)
        old, new = self._view[same:], path[same:]
        kept = _kept([self._key(each.node) for each in old], [self._key(at) for at in new]) if old else {}
        end = max(kept, default=-1) + 1
        for number in range(end):
            # In the middle a condensation can put words of the user only; what follows is said again.
            if number not in kept and self._trajectory.nodes[new[number]].message.role != "user":
                kept = {j: i for j, i in kept.items() if j < number}
                end = max(kept, default=-1) + 1
                break
        forgotten = [each for i, each in enumerate(old) if i not in kept.values()]
        begun = (_Said(at, old[kept[j]].events if j in kept else ()) for j, at in enumerate(new[:end]))
        view = [*self._view[:same], *begun]
        # What was said since comes before it is condensed, and an answer that is said again after it is forgotten.
        since = list(takewhile(lambda at: self._trajectory.nodes[at].message.role != "assistant", new[end:]))
        heard = [_Said(at, self._say(at)) for at in since]
        view = [*self._condense(view, forgotten), *heard]
        self._view = [*view, *(_Said(at, self._say(at)) for at in new[end + len(since) :])]

    def _condense(self, view: list[_Said], forgotten: Sequence[_Said]) -> list[_Said]:
        """Forget, and put what has no event yet as a summary each."""
        gone = [event for each in forgotten for event in each.events]
        offset, told = 0, []
        for each in view:
            if not each.events:
                text = self._trajectory.nodes[each.node].message.content or ""
                each = _Said(each.node, (f"{self._forget(gone, text, offset)}-summary",))
                gone = []
            offset += len(each.events)
            told.append(each)
        if gone:
            self._forget(gone, None, None)
        return told

    def _forget(self, gone: Sequence[str], summary: str | None, offset: int | None) -> str:
        identity = named_identity(self._trajectory.id, "condensation", str(len(self._events)))
        event: JsonObject = {"kind": "Condensation", "source": "environment", "forgotten_event_ids": [*gone]}
        told: JsonObject = {"summary": summary, "summary_offset": offset, "llm_response_id": identity}
        self._events.append({"id": identity, **event, **told})
        return identity

    def _say(self, at: int) -> tuple[str, ...]:
        """The ids of the message's events."""
        events = list(self._said(at))
        self._events += events
        return tuple(str(event["id"]) for event in events)

    def _said(self, at: int) -> Iterator[JsonObject]:
        trajectory, node = self._trajectory, self._trajectory.nodes[at]
        message, identity = node.message, named_identity(trajectory.id, str(at))
        if message.role == "system":
            tools = [_tool(each) for each in trajectory.tools]
            event: JsonObject = {"kind": "SystemPromptEvent", "source": "agent", "tools": [*tools]}
            yield {"id": identity, **event, "system_prompt": _text(message.content or "")}
        elif message.role == "tool":
            yield {"id": identity, **_observation(message, self._actions)}
        elif message.role == "user":
            yield {"id": identity, **_message(node)}
        else:
            # One that is said again is no answer of its own: its response is one that was there before.
            ids = tuple(call.id for call in message.tool_calls)
            response = identity if node.sampled else self._responses.get(ids, identity)
            self._responses[ids] = response
            if not message.tool_calls:
                yield {"id": identity, **_message(node), "llm_response_id": response}
            for number, call in enumerate(message.tool_calls):
                own = named_identity(trajectory.id, str(at), str(number))
                self._actions[call.id] = (own, call.name)
                yield {"id": own, **_action(node, call, response=response, first=number == 0)}

    def _key(self, at: int) -> _Key:
        said = self._trajectory.nodes[at].message
        calls = tuple((call.id, call.name) for call in said.tool_calls)
        return said.role, said.content or "", said.tool_call_id, calls


def _kept(old: Sequence[_Key], new: Sequence[_Key]) -> dict[int, int]:
    """Positions in ``new`` and in ``old`` of what is in both, in order."""
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {block.b + number: block.a + number for block in blocks for number in range(block.size)}


def _message(node: Node) -> JsonObject:
    said: JsonObject = {"role": node.message.role, "content": _texts(node.message.content), **_reasoned(node)}
    source = "agent" if node.message.role == "assistant" else "user"
    return {"kind": "MessageEvent", "source": source, "llm_message": said}


def _action(node: Node, call: ToolCall, *, response: str, first: bool) -> JsonObject:
    return {
        "kind": "ActionEvent",
        "source": "agent",
        "thought": _texts(node.message.content) if first else [],
        **(_reasoned(node) if first else {}),
        "action": None,
        "tool_name": call.name,
        "tool_call_id": call.id,
        "tool_call": {"id": call.id, "name": call.name, "arguments": call.arguments, "origin": "completion"},
        "llm_response_id": response,
    }


def _observation(message: Message, actions: dict[str, tuple[str, str]]) -> JsonObject:
    called = message.tool_call_id or ""
    action, name = actions.get(called, ("unknown", "unknown"))
    result: JsonObject = {
        "kind": "MCPToolObservation",
        "content": _texts(message.content),
        "is_error": False,
        "tool_name": message.name or name,
    }
    return {
        "kind": "ObservationEvent",
        "source": "environment",
        "tool_name": message.name or name,
        "tool_call_id": called,
        "action_id": action,
        "observation": result,
    }


def _tool(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    known = function if isinstance(function, dict) else {}
    described = str(known.get("description") or "")
    schema = known.get("parameters") or {"type": "object", "properties": {}}
    return {
        "kind": "MCPToolDefinition",
        "description": described,
        "action_type": "MCPToolAction",
        "observation_type": "MCPToolObservation",
        "mcp_tool": {"name": known.get("name"), "description": described, "inputSchema": schema},
    }


def _reasoned(node: Node) -> JsonObject:
    text = node.metadata.get("reasoning_content")
    return {"reasoning_content": text} if isinstance(text, str) else {}


def _texts(content: str | None) -> list[JsonValue]:
    return [_text(content)] if content else []


def _text(content: str) -> JsonObject:
    return {"type": "text", "text": content}


_ERROR_HEADER = "[An error occurred during execution.]\n"
_RESULTS = {"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
_SAID = _RESULTS | {"SystemPromptEvent", "MessageEvent", "ActionEvent", "ACPToolCallEvent"}


class Text(Foreign):
    """A part of a message."""

    type: str = "text"
    text: str = ""


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
    thinking_blocks: JsonValue = None
    responses_reasoning_item: JsonValue = None
    tool_name: str = ""
    tool_call_id: str = ""
    tool_call: JsonObject | None = None
    llm_response_id: str | None = None
    observation: JsonObject | None = None
    title: str = ""
    tool_kind: str | None = None
    raw_input: JsonValue = None
    raw_output: JsonValue = None
    content: JsonValue = None
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
    return Log(reader.tree, times_of(event.timestamp for event in parsed), errors, condensations)


class _Reader:
    def __init__(self, policy: PolicyRef) -> None:
        self.tree = EpisodeTree()
        self.places: dict[str, int | None] = {}
        self._policy = policy
        self._answers: dict[str, int] = {}
        # Calls of the agent behind ACP since the last message -> their nodes.
        self._agents_calls: dict[str, int] = {}
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
            case "ACPToolCallEvent":
                self._add_agents_call(event)
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
        self._agents_calls.clear()
        message = chat_message(_as_wire(event.llm_message or {}))
        if event.extended_content:
            added = [part.text for part in event.extended_content]
            message = message.model_copy(update={"content": _join([message.content or "", *added])})
        known = self._answers.get(event.llm_response_id or "")
        sampled = message.role == "assistant" and known is None
        at = say(self.tree, message, self._policy if sampled else None)
        if sampled and event.llm_response_id:
            self._answers[event.llm_response_id] = at

    def _add_action(self, event: V1Event) -> None:
        if event.tool_call is None:
            raise ExchangeError("tool_call: is required")
        # Missing fields of the call are those of the event.
        call: JsonObject = {"id": event.tool_call_id, "name": event.tool_name, **without_nulls(event.tool_call)}
        wire: JsonObject = {
            "role": "assistant",
            "content": _join(part.text for part in event.thought),
            "tool_calls": [call],
            "reasoning_content": event.reasoning_content,
            "thinking_blocks": event.thinking_blocks,
            "responses_reasoning_item": event.responses_reasoning_item,
        }
        message = chat_message(_as_wire(wire))
        known = self._answers.get(event.llm_response_id or "")
        if known is not None and known in self.tree.path():
            # Each call of a response is an event of its own.
            node = self.tree.nodes[known]
            node.message = node.message.model_copy(
                update={"tool_calls": (*node.message.tool_calls, *message.tool_calls)}
            )
            return
        # An answer that was forgotten and is said again was sampled once.
        at = say(self.tree, message, self._policy if known is None else None)
        if event.llm_response_id:
            self._answers[event.llm_response_id] = at

    def _add_agents_call(self, event: V1Event) -> None:
        """What an agent behind ACP did: as a call that was not sampled, with its result. Later events complete it."""
        given = event.raw_input if isinstance(event.raw_input, dict) else {"input": event.raw_input or event.title}
        call = ToolCall(id=event.tool_call_id, name=event.tool_kind or "tool", arguments=to_json(given).decode())
        result = event.raw_output if event.raw_output not in (None, "", {}, []) else event.content
        said = Message(role="assistant", content=event.title or None, tool_calls=(call,))
        told = Message(role="tool", content=text_of(result) or "", tool_call_id=call.id, name=call.name)
        if (known := self._agents_calls.get(call.id)) is not None:
            self.tree.nodes[known].message, self.tree.nodes[known + 1].message = said, told
            return
        self._agents_calls[call.id] = say(self.tree, said, None, {"calls": "made by an agent behind ACP"})
        say(self.tree, told, None)


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
    return [*header, shell_result(text, metadata) if isinstance(metadata, dict) else text]


def shell_result(text: str, metadata: JsonObject) -> str:
    """The result of a command as the model is shown it, with what OpenHands notes on it."""
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
    """The SDK's message as OpenAI's; it has the reasoning of OpenAI's Responses in an item of its own."""
    blocks, item = message.get("thinking_blocks"), message.get("responses_reasoning_item")
    thoughts = blocks if isinstance(blocks, list) else []
    thoughts = [*thoughts, {**item, "type": "reasoning"}] if isinstance(item, dict) else thoughts
    return {**message, "content": _parts(message.get("content")), "thinking_blocks": thoughts}


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


def _join(parts: Iterable[str]) -> str | None:
    texts = [part for part in parts if part]
    return "\n".join(texts) or None


ENVIRONMENT = "openhands"
_STATE = "base_state.json"
_EVENTS = "events"
_SUB_AGENTS = "subagents"
EVENT_KINDS = frozenset(
    {
        "SystemPromptEvent",
        "MessageEvent",
        "ActionEvent",
        "ObservationEvent",
        "UserRejectObservation",
        "AgentErrorEvent",
        "ConversationErrorEvent",
        "Condensation",
        "CondensationRequest",
        "CondensationSummaryEvent",
        "ConversationStateUpdateEvent",
        "LLMCompletionLogEvent",
        "PauseEvent",
        "ACPToolCallEvent",
        "TokenEvent",
    }
)
_REGULAR_ENDS = {"MaxIterationsReached": StopReason.MAX_TURNS}


class Llm(Foreign):
    """The part that names the model."""

    model: str | None = None


class AgentState(Foreign):
    """The agent of a conversation."""

    llm: Llm = Llm()


class BaseState(Foreign):
    """``base_state.json`` as far as it is needed: secrets and settings are not read."""

    id: str = ""
    agent: AgentState = Field(default_factory=AgentState)
    execution_status: str | None = None
    leaf_event_id: str | None = None
    agent_state: JsonValue = None

    @property
    def sub_agent(self) -> SubAgentOf | None:
        """What our export says of it. The SDK's own states say nothing."""
        said = self.agent_state.get(SUB_AGENT_STATE) if isinstance(self.agent_state, dict) else None
        try:
            return SubAgentOf.model_validate(said)
        except ValidationError:
            return None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By its kind and its source."""
    return isinstance(kind := row.get("kind"), str) and kind in EVENT_KINDS and "source" in row


def is_conversation(path: Path) -> bool:
    """Whether a folder is a stored conversation, or has some in it."""
    return path.is_dir() and bool(_conversations(path))


def source(path: Path) -> Source:
    """A conversation's folder, a folder of such folders, or files with all events of a conversation each."""
    if path.is_dir() and (folders := _conversations(path)):
        ids = cache(lambda: {_state_of(folder).id: folder for folder in folders})
        units = (
            Unit(str(folder), number, lambda folder=folder: _from_folder(folder, ids))
            for number, folder in enumerate(folders, 1)
        )
        return Source(len(folders), units)
    files = files_below(path, (".jsonl", ".json", ".jsonl.gz"))
    units = (Unit(str(file), number, lambda file=file: _from_file(file)) for number, file in enumerate(files, 1))
    return Source(len(files), units)


def _conversations(path: Path) -> list[Path]:
    if (path / _EVENTS).is_dir():
        begun = path / _SUB_AGENTS
        return [path, *(_conversations(begun) if begun.is_dir() else ())]
    return sorted(each.parent for each in path.rglob(_EVENTS) if each.is_dir())


def _state_of(folder: Path) -> BaseState:
    state = folder / _STATE
    return parse(BaseState, read_document(state)) if state.is_file() else BaseState()


def _from_folder(folder: Path, ids: Callable[[], Mapping[str, Path]], below: tuple[Path, ...] = ()) -> Imported:
    """``ids``: all conversations, among which an exported one has its parent; ``below``: whose parent it is."""
    if folder in below:
        raise ExchangeError(f"{folder}: conversations are sub-agents of each other")
    base = _state_of(folder)
    # The names are numbered with leading zeros.
    files = sorted((folder / _EVENTS).glob("event-*.json"))
    if not files:
        raise ExchangeError(f"{folder / _EVENTS}: there is no event in it")
    nested = folder.parent.name == _SUB_AGENTS and (folder.parent.parent / _EVENTS).is_dir()
    link = base.sub_agent
    above = folder.parent.parent if nested else ids().get(link.parent) if link is not None else None
    parent = _from_folder(above, ids, (*below, folder)).trajectory if above is not None else None
    return _episode(base.id or folder.name, base, [read_document(file) for file in files], parent)


def _from_file(file: Path) -> Imported:
    base = _state_of(file.parent)
    events = [row.load() for row in rows_of(file)]
    name = re.sub(r"\.(json|jsonl)(\.gz)?$", "", file.name)
    return _episode(base.id or (name if name != _EVENTS else file.absolute().parent.name), base, events)


def _episode(name: str, base: BaseState, events: Sequence[JsonValue], parent: Trajectory | None = None) -> Imported:
    if not any(recognises(event) for event in events if isinstance(event, dict)):
        raise ExchangeError("there is no event of OpenHands' SDK in it")
    log = read_log(events, PolicyRef(base_model=base.agent.llm.model or "unknown"), base.leaf_event_id)
    link = base.sub_agent
    if parent is not None:
        # The SDK's own events do not say which agent of the registry it is.
        link = SubAgentOf(parent=parent.id, kind=UNKNOWN if link is None else link.kind)
    data: JsonObject = {} if link is None else {SUB_AGENT: link.model_dump()}
    task = task_of(log.tree.messages(), ENVIRONMENT, name).model_copy(update={"data": data})
    run_id = None if link is None else sub_agents_run(UNKNOWN if parent is None else parent.run_id)
    origin = Origin("v1-events", task, base.agent.llm.model, run_id)
    stop, failure = _ending(base.execution_status, log)
    evidence: JsonObject = {"condensations": log.condensations} if log.condensations else {}
    return finished(log.tree, origin, Ending(stop, evidence, failure=failure, times=log.times))


def _ending(status: str | None, log: Log) -> tuple[StopReason, Failure | None]:
    if status == "stuck":
        return StopReason.TRUNCATED, None
    # A conversation that went on after an error is no failure.
    if not log.errors or status == "finished":
        return (StopReason.TERMINATED if status == "finished" else end_of(log.tree.messages())), None
    code, detail = log.errors[-1]
    if code in _REGULAR_ENDS:
        return _REGULAR_ENDS[code], None
    failure = Failure(
        kind=FailureKind.INFRASTRUCTURE, message=f"{code}: {detail}"[:500], boundary="openhands.conversation"
    )
    return StopReason.ERROR, failure
