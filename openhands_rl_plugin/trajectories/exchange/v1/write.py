"""A conversation as events of OpenHands' V1 SDK, from which the SDK itself makes the same messages again.

Every call is an action event with the call as it was sampled, every result the observation of an MCP tool, because that
one carries any text. Tools are MCP tools with their parameters. A history that was rewritten is a ``Condensation``, as
the SDK itself logs one: every answer that was acted on is an event, and the events of each prompt are those that the
model saw. Tokens, rewards and answers that were not acted on have no place in events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.records import sub_agent_of
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Score, StopReason, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.dates import date_of
from openhands_rl_plugin.trajectories.exchange.episodes import named_identity
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
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
    said: JsonObject = {"role": node.message.role, "content": _texts(node.message.content), **_reasoning(node)}
    source = "agent" if node.message.role == "assistant" else "user"
    return {"kind": "MessageEvent", "source": source, "llm_message": said}


def _action(node: Node, call: ToolCall, *, response: str, first: bool) -> JsonObject:
    return {
        "kind": "ActionEvent",
        "source": "agent",
        "thought": _texts(node.message.content) if first else [],
        **(_reasoning(node) if first else {}),
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


def _reasoning(node: Node) -> JsonObject:
    text = node.metadata.get("reasoning_content")
    return {"reasoning_content": text} if isinstance(text, str) else {}


def _texts(content: str | None) -> list[JsonValue]:
    return [_text(content)] if content else []


def _text(content: str) -> JsonObject:
    return {"type": "text", "text": content}
