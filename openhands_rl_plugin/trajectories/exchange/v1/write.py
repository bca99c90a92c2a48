"""A conversation as events of OpenHands' V1 SDK, from which the SDK itself makes the same messages again.

Every call is an action event with the call as it was sampled, every result the observation of an MCP tool, because that
one carries any text. Tools are MCP tools with their parameters. Tokens, rewards and branches have no place in events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.types import JsonObject, Message, Node, Score, StopReason, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.dates import date_of
from openhands_rl_plugin.trajectories.exchange.episodes import named_identity
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.writing import safe_name

_STATUS = {StopReason.TERMINATED: "finished", StopReason.ERROR: "error"}


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[tuple[str, JsonObject]]:
    """A file for each event, and the state's, in the folders that the SDK stores a conversation in.

    Raises ``LeftOutError`` when nothing was said.
    """
    nodes = [trajectory.nodes[at] for at in trajectory.path()]
    if not nodes:
        raise LeftOutError("nothing was said in it")
    name = f"{safe_name(trajectory.task.id)}/{trajectory.id}"
    state: JsonObject = {
        "id": named_identity(trajectory.id),
        "agent": {"kind": "Agent", "llm": {"model": trajectory.policy.served_name}},
        "execution_status": _STATUS.get(trajectory.stop, "paused"),
    }
    yield f"{name}/base_state.json", state
    for number, event in enumerate(_dated(trajectory, list(_events(trajectory, nodes)))):
        yield f"{name}/events/event-{number:05d}-{event['id']}.json", event


def _dated(trajectory: Trajectory, events: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """With times, from the episode's start to its end. No event names the one before: SDK 1.15 has no field for it."""
    times = trajectory.times
    step = (times.finished - times.started) / max(1, len(events) - 1)
    for number, event in enumerate(events):
        stamp = date_of(times.started + number * step).replace(tzinfo=None).isoformat()
        yield {**event, "timestamp": stamp}


def _events(trajectory: Trajectory, nodes: Sequence[Node]) -> Iterator[JsonObject]:
    actions: dict[str, tuple[str, str]] = {}
    for number, node in enumerate(nodes):
        message, identity = node.message, named_identity(trajectory.id, str(number))
        if message.role == "system":
            tools = [_tool(each) for each in trajectory.tools]
            event: JsonObject = {"kind": "SystemPromptEvent", "source": "agent", "tools": [*tools]}
            yield {"id": identity, **event, "system_prompt": _text(message.content or "")}
        elif message.role == "tool":
            yield {"id": identity, **_observation(message, actions)}
        elif message.tool_calls:
            for at, call in enumerate(message.tool_calls):
                own = named_identity(trajectory.id, str(number), str(at))
                actions[call.id] = (own, call.name)
                yield {"id": own, **_action(node, call, response=identity, first=at == 0)}
        else:
            yield {"id": identity, **_message(node)}


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
