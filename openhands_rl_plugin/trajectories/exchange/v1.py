"""Stored conversations of OpenHands' V1 SDK, read and written: folders with an event a file, or a file of events.

Written, every call is an action event with the call as it was sampled, every result the observation of an MCP tool,
because that one carries any text. Tools are MCP tools with their parameters. Where a history was rewritten a
``Condensation`` forgets what the next prompt has no more, and what follows in that prompt is logged again: every answer
that was executed is an event, and the events of each prompt are those that the model saw. Tokens, rewards and answers
that were not executed have no place in events.

Read, answers and calls are exact; observations are worded as the SDK words them for the model. Events of newer SDKs
name the one before them, so a conversation that was taken up again elsewhere becomes a branch; so does one that goes on
from a condenser's summary. Not in the events, and so lost: the parameters of the tools, and the prompts of summaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue, ValidationError
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
    PolicyRef,
    Score,
    StopReason,
    Times,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.episodes import (
    UNKNOWN,
    Imported,
    date_of,
    finished,
    named_identity,
    policy_of,
    say,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    LeftOutError,
    Record,
    Unit,
    Units,
    at_path,
    chat_message,
    files_below,
    object_at,
    present,
    read_document,
    rows_of,
    within,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.writing import safe_name

SUB_AGENT_STATE = "openhands_rl_sub_agent"
"""In the ``agent_state`` of a sub-agent's conversation: a ``SubAgentOf`` with the id of the parent's conversation."""

_NOT_SAMPLED = "not-sampled-"
"""Begins the ``llm_response_id`` of an answer that is no completion of its own: one that is logged again."""
NAME = "v1-events"
_STATUS = {StopReason.TERMINATED: "finished", StopReason.ERROR: "error"}


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[tuple[str, JsonObject]]:
    """A file for each event, and the state's, in the folders that the SDK stores a conversation in.

    Raises ``LeftOutError`` without a message.
    """
    if not trajectory.path():
        raise LeftOutError("there is no message in it")
    name = f"{safe_name(trajectory.task.id)}/{trajectory.id}"
    state: JsonObject = {
        "id": named_identity(trajectory.id),
        "agent": {"kind": "Agent", "llm": {"model": trajectory.policy.served_name}},
        "execution_status": _STATUS.get(trajectory.stop, "paused"),
    }
    if (link := sub_agent_of(trajectory.task)) is not None:
        state["agent_state"] = {SUB_AGENT_STATE: {"parent": named_identity(link.parent), "kind": link.kind}}
    yield f"{name}/base_state.json", state
    events, times = _written(trajectory), trajectory.times
    step = (times.finished - times.started) / max(1, len(events) - 1)
    for number, event in enumerate(events):
        # No event names the one before: SDK 1.15 has no field for it.
        stamp = date_of(times.started + number * step).replace(tzinfo=None).isoformat()
        yield f"{name}/events/event-{number:05d}-{event['id']}.json", {**event, "timestamp": stamp}


def _written(trajectory: Trajectory) -> list[JsonObject]:
    """The events of every answer that was executed, each below the prompt that it answered."""
    events: list[JsonObject] = []
    actions: dict[str, tuple[str, str]] = {}
    # The nodes that the SDK would show the model after the events so far, each with its events.
    view: list[tuple[int, list[JsonObject]]] = []
    answered = [trajectory.path(at) for at in trajectory.acted()]
    for path in (*answered, trajectory.path()):
        same = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], zip(view, path, strict=False)))
        if gone := [event["id"] for _, logged in view[same:] for event in logged]:
            identity = named_identity(trajectory.id, "condensation", str(len(events)))
            about: JsonObject = {"kind": "Condensation", "source": "environment", "llm_response_id": identity}
            events.append({"id": identity, **about, "forgotten_event_ids": gone, "summary": None})
        del view[same:]
        for at in path[same:]:
            logged = list(_events(trajectory, at, actions))
            events += logged
            view.append((at, logged))
    return events


def _events(trajectory: Trajectory, at: int, actions: dict[str, tuple[str, str]]) -> Iterator[JsonObject]:
    """Those that log the message of a node; ``actions``: call -> the event that made it, and its function."""
    node, identity = trajectory.nodes[at], named_identity(trajectory.id, str(at))
    message, content = node.message, _texts(node.message.content)
    thought = node.metadata.get("reasoning_content")
    reasoned = present(reasoning_content=thought if isinstance(thought, str) else None)
    response = identity if node.sampled else f"{_NOT_SAMPLED}{identity}"
    match message.role:
        case "system":
            about: JsonObject = {"kind": "SystemPromptEvent", "source": "agent"}
            prompt: JsonObject = {"type": "text", "text": message.content or ""}
            yield {"id": identity, **about, "tools": [*map(_tool, trajectory.tools)], "system_prompt": prompt}
        case "tool":
            action, name = actions.get(message.tool_call_id or "", (UNKNOWN, UNKNOWN))
            name = message.name or name
            about = {"kind": "ObservationEvent", "source": "environment", "tool_name": name, "action_id": action}
            result: JsonObject = {"kind": "MCPToolObservation", "content": content, "is_error": False}
            called = {"tool_call_id": message.tool_call_id or "", "observation": {**result, "tool_name": name}}
            yield {"id": identity, **about, **called}
        case role if not message.tool_calls:
            wire: JsonObject = {"role": role, "content": content, **reasoned}
            about = {"kind": "MessageEvent", "source": "user" if role == "user" else "agent", "llm_message": wire}
            yield {"id": identity, **about, **({} if role == "user" else {"llm_response_id": response})}
        case _:
            for number, call in enumerate(message.tool_calls):
                own = named_identity(trajectory.id, str(at), str(number))
                actions[call.id] = (own, call.name)
                # The text before the calls stands in the first event.
                yield {
                    "id": own,
                    "kind": "ActionEvent",
                    "source": "agent",
                    "thought": content if number == 0 else [],
                    **(reasoned if number == 0 else {}),
                    "action": None,
                    "tool_name": call.name,
                    "tool_call_id": call.id,
                    "tool_call": {**call.model_dump(), "origin": "completion"},
                    "llm_response_id": response,
                }


def _tool(tool: JsonObject) -> JsonObject:
    function = object_at(tool, "function")
    described = str(function.get("description") or "")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "kind": "MCPToolDefinition",
        "description": described,
        "action_type": "MCPToolAction",
        "observation_type": "MCPToolObservation",
        "mcp_tool": {"name": function.get("name"), "description": described, "inputSchema": schema},
    }


def _texts(content: str | None) -> list[JsonValue]:
    return [{"type": "text", "text": content}] if content else []


_ERROR_HEADER = "[An error occurred during execution.]\n"
_RESULTS = {"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
_SPOKEN = _RESULTS | {"SystemPromptEvent", "MessageEvent", "ActionEvent", "ACPToolCallEvent"}


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
    parsed: list[Record] = []
    for number, each in enumerate(events):
        with within(f"event {number}"):
            parsed.append(Record(each))
            reader.take(parsed[-1])
    if leaf is not None and leaf in reader.places:
        reader.tree.head = reader.places[leaf]
    errors = [event for event in parsed if event.get("kind") == "ConversationErrorEvent"]
    return Log(
        reader.tree,
        times_of(event.get("timestamp") for event in parsed),
        tuple((event.text("code"), event.text("detail")) for event in errors),
        sum(event.get("kind") == "Condensation" for event in parsed),
    )


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

    def take(self, event: Record) -> None:
        """Add the event's message below the event that it names, or below the last one."""
        if (parent := event.text("parent_id")) in self.places:
            self.tree.head = self.places[parent]
        match kind := event.text("kind"):
            case "SystemPromptEvent":
                tools = event.read(list, "tools") or []
                self.tree.tools = self.tree.tools or tuple(read_tool(tool) for tool in tools)
                parts = (event.record(name).text("text") for name in ("system_prompt", "dynamic_context"))
                say(self.tree, Message(role="system", content=_join(parts) or ""), None)
            case "MessageEvent":
                self._agents_calls.clear()
                message = chat_message(_as_wire(event.record("llm_message").fields))
                if added := _part_texts(event, "extended_content"):
                    message = message.model_copy(update={"content": _join([message.content or "", *added])})
                self._say(event, message)
            case "ActionEvent":
                self._add_action(event)
            case _ if kind in _RESULTS:
                content = _join([*_result(event, kind), *_part_texts(event, "extended_content")])
                called, name = event.text("tool_call_id"), event.read(str, "tool_name")
                say(self.tree, Message(role="tool", content=content, tool_call_id=called, name=name or None), None)
            case "ACPToolCallEvent":
                self._add_agents_call(event)
            case "Condensation":
                self._condense(event)
            case _:
                pass
        head = self.places[event.text("id")] = self.tree.head
        if head is not None and kind in _SPOKEN:
            self._events[head] = (*self._events.get(head, ()), event.text("id"))

    def _condense(self, event: Record) -> None:
        """Go on as the SDK does: without the events that are forgotten, and with the summary in their place."""
        forgotten, path = {*map(str, event.read(list, "forgotten_event_ids") or ())}, self.tree.path()
        summary, offset = event.read(str, "summary"), event.read(int, "summary_offset")
        offset = None if summary is None else offset
        kept = [at for at in path if not self._events.get(at) or not forgotten.issuperset(self._events[at])]
        pairs = enumerate(zip(path, kept, strict=False))
        same = next((number for number, (old, new) in pairs if old != new), len(kept))
        if offset is not None:
            # So many of the nodes stand before the summary.
            ends = accumulate(len(self._events.get(at, ())) for at in kept)
            same = min(same, sum(end <= offset for end in ends))
        before = sum(len(self._events.get(at, ())) for at in kept[:same])
        for at in path[same:]:
            if self.tree.nodes[at].sampled:
                self.tree.nodes[at].metadata[ACTED] = True
        self.tree.head = kept[same - 1] if same else None
        for at in (*kept[same:], None):
            if offset is not None and (at is None or before >= offset):
                offset = None
                self._say_again(Message(role="user", content=summary), (f"{event.text('id')}-summary",))
            if at is not None:
                before += len(self._events.get(at, ()))
                self._say_again(self.tree.nodes[at].message, self._events.get(at, ()))

    def _say_again(self, message: Message, events: tuple[str, ...]) -> None:
        self.tree.head = self.tree.append(message)
        self._events[self.tree.head] = events

    def _say(self, event: Record, message: Message) -> None:
        """Append a message; an answer that was forgotten and is logged again was sampled once."""
        response = event.text("llm_response_id")
        again = response in self._answers or response.startswith(_NOT_SAMPLED)
        at = say(self.tree, message, self._policy if message.role == "assistant" and not again else None)
        if response:
            self._answers[response] = at

    def _add_action(self, event: Record) -> None:
        if not event.get("tool_call"):
            raise ExchangeError("tool_call: is required")
        # Missing fields of the call are those of the event.
        own: JsonObject = {"id": event.text("tool_call_id"), "name": event.text("tool_name")}
        call: JsonObject = {**own, **without_nulls(event.record("tool_call").fields)}
        about = ("reasoning_content", "thinking_blocks", "responses_reasoning_item")
        wire = {"role": "assistant", "content": _join(_part_texts(event, "thought")), "tool_calls": [call]}
        message = chat_message(_as_wire({**wire, **{name: event.get(name) for name in about}}))
        known = self._answers.get(event.text("llm_response_id"))
        if known is None or known not in self.tree.path():
            self._say(event, message)
            return
        # Each call of a response is an event of its own.
        node = self.tree.nodes[known]
        calls = (*node.message.tool_calls, *message.tool_calls)
        node.message = node.message.model_copy(update={"tool_calls": calls})

    def _add_agents_call(self, event: Record) -> None:
        """What an agent behind ACP did: as a call that was not sampled, with its result. Later events complete it."""
        raw, title = event.get("raw_input"), event.text("title")
        given = raw if isinstance(raw, dict) else {"input": raw or title}
        name = event.text("tool_kind") or "tool"
        call = ToolCall(id=event.text("tool_call_id"), name=name, arguments=to_json(given).decode())
        result = text_of(event.get("raw_output") or event.get("content")) or ""
        asked = Message(role="assistant", content=title or None, tool_calls=(call,))
        seen = Message(role="tool", content=result, tool_call_id=call.id, name=name)
        if (known := self._agents_calls.get(call.id)) is not None:
            self.tree.nodes[known].message, self.tree.nodes[known + 1].message = asked, seen
            return
        self._agents_calls[call.id] = say(self.tree, asked, None, {"calls": "made by an agent behind ACP"})
        say(self.tree, seen, None)


def _result(event: Record, kind: str) -> list[str]:
    if kind == "AgentErrorEvent":
        return [event.text("error")]
    if kind == "UserRejectObservation":
        return [f"Action rejected: {event.text('rejection_reason')}"]
    observation = event.record("observation")
    text, metadata = text_of(_parts(observation.get("content"))) or "", observation.get("metadata")
    header = [_ERROR_HEADER] if observation.get("is_error") else []
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
    mcp, kind = object_at(tool, "mcp_tool"), str(tool.get("kind", ""))
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower().removesuffix("_tool")
    name = str(mcp.get("name") or tool.get("name") or snake)
    about = present(description=tool.get("description"), parameters=mcp.get("inputSchema"))
    return {"type": "function", "function": {"name": name, **about}}


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
    shown = ((part, at_path(part, "image_urls")) for part in content)
    image: JsonValue = {"type": "image_url"}
    return [each for part, urls in shown for each in ([image] * len(urls) if isinstance(urls, list) else [part])]


def _part_texts(event: Record, name: str) -> list[str]:
    return [part.text("text") for part in event.records(name)]


def _join(parts: Iterable[str]) -> str | None:
    return "\n".join(filter(None, parts)) or None


_STATE, _EVENTS, _SUB_AGENTS = "base_state.json", "events", "subagents"


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By its kind and its source."""
    kind = str(row.get("kind"))
    return "source" in row and (kind in _SPOKEN or kind.startswith("Condensation") or kind.endswith("Event"))


def is_conversation(path: Path) -> bool:
    """Whether a folder is a stored conversation, or has some in it."""
    return path.is_dir() and bool(_conversations(path))


def read_folder(path: Path) -> Units:
    """A conversation's folder, a folder of such folders, or files with all events of a conversation each."""
    if path.is_dir() and (folders := _conversations(path)):
        ids = cache(lambda: {_state_of(folder).text("id"): folder for folder in folders})
        return (Unit(str(folder), partial(_from_folder, folder, ids)) for folder in folders)
    files = files_below(path, (".jsonl", ".json", ".jsonl.gz"))
    return (Unit(str(file), partial(_from_file, file)) for file in files)


def _conversations(path: Path) -> list[Path]:
    if (path / _EVENTS).is_dir():
        begun = path / _SUB_AGENTS
        return [path, *(_conversations(begun) if begun.is_dir() else ())]
    return sorted(each.parent for each in path.rglob(_EVENTS) if each.is_dir())


def _state_of(folder: Path) -> Record:
    """``base_state.json`` as far as it is needed: secrets and settings are not read."""
    state = folder / _STATE
    return Record(read_document(state) if state.is_file() else {})


def _sub_agent(state: Record) -> SubAgentOf | None:
    """What our export says of it. The SDK's own states say nothing."""
    try:
        return SubAgentOf.model_validate(at_path(state.get("agent_state"), SUB_AGENT_STATE))
    except ValidationError:
        return None


def _from_folder(folder: Path, ids: Callable[[], Mapping[str, Path]], below: tuple[Path, ...] = ()) -> Imported:
    """``ids``: all conversations, among which an exported one has its parent; ``below``: whose parent it is."""
    if folder in below:
        raise ExchangeError(f"{folder}: conversations are sub-agents of each other")
    state = _state_of(folder)
    # The names are numbered with leading zeros.
    files = sorted((folder / _EVENTS).glob("event-*.json"))
    if not files:
        raise ExchangeError(f"{folder / _EVENTS}: there is no event in it")
    nested = folder.parent.name == _SUB_AGENTS and (folder.parent.parent / _EVENTS).is_dir()
    link = _sub_agent(state)
    above = folder.parent.parent if nested else ids().get(link.parent) if link is not None else None
    parent = _from_folder(above, ids, (*below, folder)).trajectory if above is not None else None
    return _episode(folder.name, state, [read_document(file) for file in files], parent)


def _from_file(file: Path) -> Imported:
    name = re.sub(r"\.(json|jsonl)(\.gz)?$", "", file.name)
    name = name if name != _EVENTS else file.absolute().parent.name
    return _episode(name, _state_of(file.parent), [row.read() for row in rows_of(file)])


def _episode(name: str, state: Record, events: Sequence[JsonValue], parent: Trajectory | None = None) -> Imported:
    if not any(recognises(event) for event in events if isinstance(event, dict)):
        raise ExchangeError("there is no event of OpenHands' SDK in it")
    model = state.record("agent").record("llm").read(str, "model")
    log = read_log(events, policy_of(model), state.read(str, "leaf_event_id"))
    link = _sub_agent(state)
    if parent is not None:
        # The SDK's own events do not say which agent of the registry it is.
        link = SubAgentOf(parent=parent.id, kind=UNKNOWN if link is None else link.kind)
    data: JsonObject = {} if link is None else {SUB_AGENT: link.model_dump()}
    task = task_of(log.tree.messages(), "openhands", state.text("id") or name).model_copy(update={"data": data})
    run_id = None if link is None else sub_agents_run(UNKNOWN if parent is None else parent.run_id)
    stop, failure = _ending(state.text("execution_status"), log)
    evidence = present(condensations=log.condensations or None)
    about = {"model": model, "run_id": run_id, "evidence": evidence, "failure": failure, "times": log.times}
    return finished(log.tree, NAME, task, stop, **about)


def _ending(status: str, log: Log) -> tuple[StopReason | None, Failure | None]:
    if status in ("stuck", "finished"):
        return StopReason.TRUNCATED if status == "stuck" else StopReason.TERMINATED, None
    # A conversation that went on after an error is no failure.
    if not log.errors:
        return None, None
    code, detail = log.errors[-1]
    if code == "MaxIterationsReached":
        return StopReason.MAX_TURNS, None
    failure = Failure(
        kind=FailureKind.INFRASTRUCTURE, message=f"{code}: {detail}"[:500], boundary="openhands.conversation"
    )
    return StopReason.ERROR, failure
