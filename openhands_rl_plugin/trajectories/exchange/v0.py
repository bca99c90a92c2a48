"""Rows of ``output.jsonl`` of OpenHands' evaluation: V0's events, read and written; V1's are read.

An agent's action holds the model's whole response, so answers and calls are exact. Observations are worded as
OpenHands words them for the model. Not in the events, and so lost: text that OpenHands renders from its own templates
(workspace context, microagents), pictures, what a condenser made of the history, and answers that were no valid action.

Written, every call is an action with the whole response in its ``tool_call_metadata``: ``run`` for ``execute_bash`` and
V1's ``terminal``, ``finish``, and ``call_tool_mcp`` for any other function, because that one carries arbitrary
arguments. Results are observations whose content is the text as the model got it. Tokens, rewards and branches have no
place in events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Failure,
    FailureKind,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    StopReason,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.conversations import arguments_object, spoken, wire_of
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    UNKNOWN,
    Ending,
    Imported,
    Origin,
    date_of,
    end_of,
    finished,
    patch_of,
    resolved,
    reward_of,
    say,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ChatMessage,
    ExchangeError,
    Foreign,
    LeftOutError,
    Said,
    from_text,
    parse,
    tools_of,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.v1 import Llm, read_log, shell_result

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

    message: ChatMessage


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
        self._responses: set[tuple[str, Said]] = set()
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
        said = response.choices[0].message
        # Each call of a response is an action of its own. Not every server gives its responses ids of their own.
        if (response.id, said) not in self._responses:
            self._responses.add((response.id, said))
            say(self.tree, said, self._policy)

    def _reconstruct_call(self, event: V0Event, action: str) -> None:
        function, parameters = _FUNCTIONS[action]
        arguments = {new: event.args[old] for old, new in parameters.items() if event.args.get(old) is not None}
        if action == "read":
            arguments = {"command": "view", **arguments}
        name = f"call_{len(self.tree.nodes)}"
        call = ToolCall(id=name, name=function, arguments=to_json(arguments).decode())
        thought = None if action == "think" else _text(event.args.get("thought"))
        thought = None if thought in ("", "null") else thought
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
            held = event.extras.get("metadata")
            return shell_result(event.content, held if isinstance(held, dict) else {**event.extras})
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


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


_SHELL = {"execute_bash", "execute_powershell", "terminal"}
_MCP = "call_tool_mcp"


def history(trajectory: Trajectory, messages: Sequence[Message]) -> list[JsonObject]:
    """The events, numbered; the first has the time at which the episode started and the last that of its end."""
    events = list(_events(trajectory, messages))
    times = trajectory.times
    step = (times.finished - times.started) / max(1, len(events) - 1)
    stamps = (date_of(times.started + number * step).replace(tzinfo=None) for number in range(len(events)))
    return [
        {"id": at, "timestamp": stamp.isoformat(), **event}
        for at, (stamp, event) in enumerate(zip(stamps, events, strict=True))
    ]


def _events(trajectory: Trajectory, messages: Sequence[Message]) -> Iterator[JsonObject]:
    asked: dict[str, JsonObject] = {}
    functions: dict[str, ToolCall] = {}
    for number, message in enumerate(messages):
        if message.role == "assistant" and message.tool_calls:
            response = response_of(f"{trajectory.id}-{number}", trajectory.policy.served_name, wire_of(message))
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
    arguments = arguments_object(call.arguments) or {}
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


def _observation(message: Message, asked: dict[str, JsonObject], functions: dict[str, ToolCall]) -> JsonObject:
    content, called = message.content or "", message.tool_call_id or ""
    call = functions.get(called)
    event: JsonObject = {"source": "agent", "message": "", "content": content}
    if called in asked:
        event["tool_call_metadata"] = asked[called]
    if call is not None and call.name in _SHELL:
        command = (arguments_object(call.arguments) or {}).get("command")
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


def response_of(identity: str, model: str, message: JsonValue, finish: str = "tool_calls", at: int = 0) -> JsonObject:
    """The chat completion with this answer."""
    choice: JsonObject = {"index": 0, "finish_reason": finish, "message": message}
    return {"id": identity, "object": "chat.completion", "created": at, "model": model, "choices": [choice]}


_TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


class Metadata(Foreign):
    """What the harness ran."""

    agent_class: str | None = None
    llm_config: Llm = Llm()
    llm: Llm = Llm()
    dataset: str | None = None
    data_split: str | None = None
    eval_output_dir: str | None = None


class EvalOutput(Foreign):
    """One instance of a run, or the events of a saved trajectory. ``report`` stands where ``update_output_with_eval``
    puts it."""

    instance_id: str | None = None
    test_result: JsonObject = Field(default_factory=dict)
    instruction: str = ""
    metadata: Metadata = Metadata()
    history: tuple[JsonValue, ...] = ()
    metrics: JsonValue = None
    error: str | None = None
    instance: JsonObject = Field(default_factory=dict)
    report: JsonObject | None = None
    run_id: str | None = None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """An instance with its history or its result, or a history alone."""
    known = not {"history", "test_result"}.isdisjoint(row) if "instance_id" in row else "history" in row
    return known and "messages" not in row and "trajectory" not in row


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row. Raises ``LeftOutError`` when nothing was said."""
    messages = spoken(trajectory, transcript_nodes(trajectory))
    if not messages:
        raise LeftOutError("nothing was said in it")
    test_result: JsonObject = {"git_patch": patch_of(trajectory) or ""}
    judged = resolved(trajectory, scores)
    held = trajectory.evidence.get("test_result")
    if isinstance(held, dict):
        test_result = {**held, **test_result}
    if judged is not None and "report" not in test_result:
        test_result["report"] = {"resolved": judged, "empty_generation": not test_result["git_patch"]}
    row: JsonObject = {
        "instance_id": trajectory.task.id,
        "test_result": test_result,
        "instruction": trajectory.task.instruction,
        "metadata": _metadata(trajectory),
        "history": [*history(trajectory, messages)],
        "metrics": {"accumulated_token_usage": _usage(trajectory)},
        "instance": trajectory.task.data,
        "run_id": trajectory.run_id,
    }
    yield row if trajectory.failure is None else {**row, "error": trajectory.failure.message}


def read(row: JsonObject) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    record = parse(EvalOutput, row)
    if not record.history and not record.test_result and record.error is None:
        raise ExchangeError("history: is required, or test_result or error of an instance that was not played")
    metadata = record.metadata
    data = without_nulls(record.instance)
    for name in _TEST_LISTS:
        with suppress(ExchangeError):
            data |= {name: from_text(data[name])} if isinstance(data.get(name), str) else {}
    run_id = record.run_id or metadata.eval_output_dir
    model = metadata.llm_config.model or metadata.llm.model
    policy = PolicyRef(base_model=model or UNKNOWN)
    if any(isinstance(event, dict) and "kind" in event for event in record.history):
        tree = read_log(record.history, policy).tree
    else:
        tree = EventReader(policy).read(record.history)
    task = task_of(tree.messages(), SWE, record.instance_id)
    asked = next((text for text in (record.instruction, data.get("problem_statement")) if text), task.instruction)
    about = {"instruction": str(asked), "data": data, "split": metadata.data_split or ""}
    origin = Origin("output-jsonl", task.model_copy(update=about), model, run_id)
    evidence = _evidence(record)
    judged = _report(record).get("resolved")
    known = judged if isinstance(judged, bool) else None
    stop, failure = _ending(record, end_of(tree.messages()))
    detail: JsonObject = {} if known is None else {"resolved": known}
    times = times_of(event.get("timestamp") for event in record.history if isinstance(event, dict))
    return finished(tree, origin, Ending(stop, evidence, reward_of(known), detail, failure, times))


def _metadata(trajectory: Trajectory) -> JsonObject:
    # The harness requires each of these, if only as an empty value.
    return {
        "agent_class": trajectory.strategy.name,
        "llm_config": {"model": trajectory.policy.served_name},
        "max_iterations": trajectory.task.limits.max_turns if trajectory.task.limits else len(trajectory.nodes),
        "eval_output_dir": trajectory.run_id,
        "start_time": date_of(trajectory.times.started).strftime("%Y-%m-%d %H:%M:%S"),
        "git_commit": "",
        "dataset": trajectory.task.environment,
        "data_split": trajectory.task.split,
        "details": {"trajectory_id": trajectory.id, "stop": trajectory.stop.value},
    }


def _usage(trajectory: Trajectory) -> JsonObject:
    usage = trajectory.usage
    return {
        "model": trajectory.policy.served_name,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cache_read_tokens": usage.cached_tokens,
    }


def _evidence(record: EvalOutput) -> JsonObject:
    evidence: JsonObject = {}
    if record.test_result or record.report is not None:
        evidence["test_result"] = {**record.test_result, "report": _report(record)}
    if record.metrics is not None:
        evidence["metrics"] = record.metrics
    return evidence


def _report(record: EvalOutput) -> JsonObject:
    held = record.test_result.get("report")
    return held if isinstance(held, dict) else record.report or {}


def _ending(record: EvalOutput, recorded: StopReason) -> tuple[StopReason, Failure | None]:
    """OpenHands' own limits are regular ends; any other error makes the episode no valid sample."""
    if record.error is None:
        return recorded, None
    error = record.error.lower()
    if "maximum iteration" in error:
        return StopReason.MAX_TURNS, None
    if "maximum budget" in error or "stuck in a loop" in error or "stuckinloop" in error:
        return StopReason.TRUNCATED, None
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message=record.error[:500], boundary="openhands.evaluation")
    return StopReason.ERROR, failure
