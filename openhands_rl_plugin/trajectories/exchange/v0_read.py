"""The model's prompts and answers, from OpenHands V0's event history.

An agent's action holds the model's whole response, so answers and calls are exact. Observations are worded as
OpenHands words them for the model. Not in the events, and so lost: text that OpenHands renders from its own templates
(workspace context, microagents), pictures, what a condenser made of the history, and answers that were no valid action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import JsonObject, Message, PolicyRef, ToolCall
from openhands_rl_plugin.trajectories.exchange.episodes import say
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Foreign, WireMessage, parse, tools_of

_SILENT = {"agent_state_changed", "null", "recall", "loop_detection", "success"}
# Actions of old histories, which do not hold the response -> the function that the agent called, and its parameters.
_FUNCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "run": ("execute_bash", {"command": "command", "is_input": "is_input"}),
    "run_ipython": ("execute_ipython_cell", {"code": "code"}),
    "read": ("str_replace_editor", {"path": "path", "view_range": "view_range"}),
    "edit": (
        "str_replace_editor",
        {
            "command": "command",
            "path": "path",
            "file_text": "file_text",
            "old_str": "old_str",
            "new_str": "new_str",
            "insert_line": "insert_line",
        },
    ),
    "think": ("think", {"thought": "thought"}),
    "finish": ("finish", {"final_thought": "message"}),
    "browse": ("browser", {"url": "url"}),
    "browse_interactive": ("browser", {"browser_actions": "code"}),
}


class Choice(Foreign):
    """One choice of a response."""

    message: WireMessage


class Response(Foreign):
    """A chat completion."""

    id: str = ""
    model: str | None = None
    choices: tuple[Choice, ...] = ()


class CallMetadata(Foreign):
    """Which call of which response an event belongs to."""

    function_name: str = ""
    tool_call_id: str = ""
    model_response: Response = Response()


class V0Event(Foreign):
    """An action or an observation, as ``event_to_dict`` writes it."""

    source: str = ""
    action: str | None = None
    observation: str | None = None
    args: JsonObject = Field(default_factory=dict)
    extras: JsonObject = Field(default_factory=dict)
    content: str = ""
    tool_call_metadata: CallMetadata | None = None


class EventReader:
    """Turns events into nodes of a tree, in order."""

    def __init__(self, policy: PolicyRef) -> None:
        self.tree = EpisodeTree()
        self._policy = policy
        self._responses: set[tuple[str, WireMessage]] = set()
        self._pending: ToolCall | None = None

    def read(self, history: Sequence[JsonValue]) -> EpisodeTree:
        """All events; old histories are pairs of action and observation. Raises ``ExchangeError``."""
        for number, entry in enumerate(history):
            for event in entry if isinstance(entry, list) else [entry]:
                try:
                    self._take(parse(V0Event, event))
                except ExchangeError as error:
                    raise ExchangeError(f"history[{number}]: {error}") from error
        return self.tree

    def _take(self, event: V0Event) -> None:
        if event.action is not None:
            self._act(event, event.action)
        elif event.observation is not None:
            self._observe(event, event.observation)

    def _act(self, event: V0Event, action: str) -> None:
        metadata, thought = event.tool_call_metadata, _text(event.args.get("content") or event.args.get("thought"))
        if metadata is not None and event.source != "user":
            self._respond(metadata)
        elif action == "system":
            self.tree.tools = self.tree.tools or tools_of(event.args.get("tools"))
            say(self.tree, Message(role="system", content=thought), None)
        elif action == "message":
            by_user = event.source == "user"
            message = Message(role="user" if by_user else "assistant", content=thought)
            say(self.tree, message, None if by_user else self._policy)
        elif event.source == "user" and action == "run":
            asked = f"User executed the command:\n{_text(event.args.get('command'))}"
            say(self.tree, Message(role="user", content=asked), None)
        elif event.source == "agent" and action in _FUNCTIONS:
            self._reconstruct_call(event, action)

    def _respond(self, metadata: CallMetadata) -> None:
        response = metadata.model_response
        if not response.choices:
            raise ExchangeError("tool_call_metadata.model_response.choices: is empty")
        wire = response.choices[0].message
        # Each call of a response is an action of its own. Not every server gives its responses ids of their own.
        if (response.id, wire) in self._responses:
            return
        self._responses.add((response.id, wire))
        reasoning: JsonObject = {"reasoning_content": wire.reasoning_content} if wire.reasoning_content else {}
        say(self.tree, wire.message(), self._policy, reasoning)

    def _reconstruct_call(self, event: V0Event, action: str) -> None:
        function, parameters = _FUNCTIONS[action]
        arguments = {new: event.args[old] for old, new in parameters.items() if event.args.get(old) is not None}
        if action == "read":
            arguments = {"command": "view", **arguments}
        name = f"call_{len(self.tree.nodes)}"
        call = ToolCall(id=name, name=function, arguments=to_json(arguments).decode())
        thought = None if action == "think" else _text(event.args.get("thought")) or None
        metadata: JsonObject = {"calls": "made from the action; the response is not in the record"}
        say(self.tree, Message(role="assistant", content=thought, tool_calls=(call,)), self._policy, metadata)
        self._pending = call

    def _observe(self, event: V0Event, observation: str) -> None:
        metadata = event.tool_call_metadata
        if observation in _SILENT and metadata is None:
            return
        text = _observation_text(event, observation)
        pending, self._pending = self._pending, None
        if metadata is not None:
            result = Message(role="tool", content=text, tool_call_id=metadata.tool_call_id, name=metadata.function_name)
        elif pending is not None:
            result = Message(role="tool", content=text, tool_call_id=pending.id, name=pending.name)
        else:
            asked_by_user = observation == "run"
            words = f"\nObserved result of command executed by user:\n{text}" if asked_by_user else text
            result = Message(role="user", content=words)
        say(self.tree, result, None)


def _observation_text(event: V0Event, observation: str) -> str:
    match observation:
        case "run":
            return "".join(_command_result(event))
        case "run_ipython":
            shown = "![image](data:image/png;base64, ...) already displayed to user"
            lines = event.content.split("\n")
            return "\n".join(shown if "![image](data:image/png;base64," in line else line for line in lines)
        case "error":
            return f"{event.content}\n[Error occurred in processing last action]"
        case "user_rejected":
            return f"OBSERVATION:\n{event.content}\n[Last action has been rejected by the user]"
        case "delegate":
            outputs = event.extras.get("outputs")
            return _text(outputs.get("content")) or event.content if isinstance(outputs, dict) else event.content
        case _:
            return event.content


def _command_result(event: V0Event) -> Iterator[str]:
    held = event.extras.get("metadata")
    metadata = held if isinstance(held, dict) else {"exit_code": event.extras.get("exit_code")}
    yield f"{_text(metadata.get('prefix'))}{event.content}{_text(metadata.get('suffix'))}"
    if metadata.get("working_dir"):
        yield f"\n[Current working directory: {metadata['working_dir']}]"
    if metadata.get("py_interpreter_path"):
        yield f"\n[Python interpreter: {metadata['py_interpreter_path']}]"
    if metadata.get("exit_code") not in (None, -1):
        yield f"\n[Command finished with exit code {metadata['exit_code']}]"


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""
