"""A conversation as OpenHands V0's events, from which OpenHands itself makes the same messages again.

Every call becomes an action with the whole response in its ``tool_call_metadata``: ``run`` for ``execute_bash``
and V1's ``terminal``, ``finish``, and ``call_tool_mcp`` for any other function, because that one carries arbitrary
arguments. Results become observations whose content is the text as the model got it. Tokens, rewards and branches have
no place in events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.conversations import wire_of
from openhands_rl_plugin.trajectories.exchange.dates import date_of
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, from_text

_SHELL = {"execute_bash", "execute_powershell", "terminal"}
_MCP = "call_tool_mcp"


def history(trajectory: Trajectory, messages: Sequence[Message]) -> list[JsonObject]:
    """The events, numbered; the first has the time at which the episode started and the last that of its end."""
    events = list(_events(trajectory, messages))
    times = trajectory.times
    step = (times.finished - times.started) / max(1, len(events) - 1)
    return [
        {"id": number, "timestamp": _stamp(times.started + number * step), **event}
        for number, event in enumerate(events)
    ]


def _stamp(at: float) -> str:
    return date_of(at).replace(tzinfo=None).isoformat()


def _events(trajectory: Trajectory, messages: Sequence[Message]) -> Iterator[JsonObject]:
    asked: dict[str, JsonObject] = {}
    functions: dict[str, ToolCall] = {}
    for number, message in enumerate(messages):
        if message.role == "assistant" and message.tool_calls:
            response = _response(f"{trajectory.id}-{number}", trajectory.policy.served_name, message)
            for call in message.tool_calls:
                asked[call.id] = _call_metadata(call, len(message.tool_calls), response)
                functions[call.id] = call
                yield {**_action(call, message.content or ""), "tool_call_metadata": asked[call.id]}
        elif message.role == "tool":
            yield _observation(message, asked, functions)
        else:
            yield _message(message, trajectory)


def _message(message: Message, trajectory: Trajectory) -> JsonObject:
    content = message.content or ""
    if message.role == "system":
        args: JsonObject = {"content": content, "tools": [*trajectory.tools], "agent_class": trajectory.strategy.name}
        return {"source": "agent", "message": content, "action": "system", "args": args}
    source = "agent" if message.role == "assistant" else "user"
    args = {"content": content, "image_urls": None, "file_urls": None, "wait_for_response": False}
    return {"source": source, "message": content, "action": "message", "args": args}


def _action(call: ToolCall, thought: str) -> JsonObject:
    arguments = _arguments(call)
    if call.name in _SHELL and isinstance(command := arguments.get("command"), str):
        args: JsonObject = {
            "command": command,
            "is_input": arguments.get("is_input") in (True, "true"),
            "thought": thought,
        }
        return {"source": "agent", "message": f"Running command: {command}", "action": "run", "args": args}
    if call.name == "finish":
        final = arguments.get("message")
        args = {"final_thought": final if isinstance(final, str) else "", "outputs": {}, "thought": thought}
        return {"source": "agent", "message": thought, "action": "finish", "args": args}
    args = {"name": call.name, "arguments": arguments, "thought": thought}
    return {"source": "agent", "message": f"Calling {call.name}", "action": _MCP, "args": args}


def _arguments(call: ToolCall) -> JsonObject:
    """As an object; the raw text stays in the response."""
    try:
        arguments = from_text(call.arguments or "{}")
    except ExchangeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _observation(message: Message, asked: dict[str, JsonObject], functions: dict[str, ToolCall]) -> JsonObject:
    content, called = message.content or "", message.tool_call_id or ""
    call = functions.get(called)
    event: JsonObject = {"source": "agent", "message": "", "content": content}
    if called in asked:
        event["tool_call_metadata"] = asked[called]
    if call is not None and call.name in _SHELL:
        command = _arguments(call).get("command")
        extras: JsonObject = {"command": command if isinstance(command, str) else "", "metadata": {"exit_code": -1}}
        return {**event, "observation": "run", "extras": {**extras, "hidden": False}}
    return {**event, "observation": "mcp", "extras": {"name": message.name or "", "arguments": {}}}


def _call_metadata(call: ToolCall, calls: int, response: JsonObject) -> JsonObject:
    return {
        "function_name": call.name,
        "tool_call_id": call.id,
        "model_response": response,
        "total_calls_in_response": calls,
    }


def _response(identity: str, model: str, message: Message) -> JsonObject:
    choice: JsonObject = {"index": 0, "finish_reason": "tool_calls", "message": wire_of(message)}
    return {"id": identity, "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
