"""What OpenHands V0 stores: ``output.jsonl``, events of a saved trajectory, and ``llm_completions``. V1's events in
``output.jsonl`` are read, too.

In events an agent's action holds the model's whole response, so answers and calls are exact. Observations are worded as
OpenHands words them for the model. Not in the events, and so lost: text that OpenHands renders from its own templates
(workspace context, microagents), pictures, what a condenser made of the history, and answers that were no valid action.

Written, every call is an action with the whole response in its ``tool_call_metadata``: ``run`` for ``execute_bash`` and
V1's ``terminal``, ``finish``, and ``call_tool_mcp`` for any other function, because that one carries arbitrary
arguments. Results are observations whose content is the text as the model got it. Tokens, rewards and branches have no
place in events.

``llm_completions`` has a folder an instance, in it a file a call of the model. All calls of an instance become one
tree: a prompt that extends the one before continues its path, and where the host rewrote the history (a condenser, a
changed prompt) a branch begins. A condenser's own calls are trees beside it. For models that were prompted with text a
file has the calls in native form too, and those are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import plain_message, transcript_nodes
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    ACTED,
    CONDENSATION,
    KIND,
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
from openhands_rl_plugin.trajectories.exchange.conversations import (
    arguments_object,
    conversation_of,
    read_system_prompt,
    spoken,
    wire_of,
)
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    Imported,
    date_of,
    finished,
    patch_of,
    policy_of,
    resolved,
    say,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    LeftOutError,
    Record,
    RecordMessage,
    Unit,
    Units,
    at_path,
    chat_message,
    files_below,
    from_text,
    object_at,
    present,
    read_document,
    tools_of,
    within,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.v1 import read_log, read_tool, shell_result
from openhands_rl_plugin.trajectories.exchange.writing import safe_name

_SILENT = {"agent_state_changed", "null", "recall", "loop_detection", "success"}
_EDITOR = "str_replace_editor"
# Actions of old histories, which do not hold the response -> the function that the agent called.
_OLD_ACTIONS = {"run": "execute_bash", "run_ipython": "execute_ipython_cell", "read": _EDITOR, "edit": _EDITOR}
_OLD_ACTIONS |= {"think": "think", "finish": "finish", "browse": "browser", "browse_interactive": "browser"}
_PARAMETERS = {"command", "is_input", "code", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"}
_PARAMETERS |= {"url", "message"}
_RENAMED = {"final_thought": "message", "browser_actions": "code"}


def read_history(history: Sequence[JsonValue], policy: PolicyRef) -> EpisodeTree:
    """The events of V0; old histories are pairs of action and observation. Raises ``ExchangeError``."""
    reader = _EventReader(policy)
    for number, entry in enumerate(history):
        for event in entry if isinstance(entry, list) else [entry]:
            with within(f"history[{number}]"):
                reader.take(Record(event))
    return reader.tree


class _EventReader:
    def __init__(self, policy: PolicyRef) -> None:
        self.tree = EpisodeTree()
        self._policy = policy
        self._responses: set[tuple[str, RecordMessage]] = set()
        self._pending: ToolCall | None = None

    def take(self, event: Record) -> None:
        """Append what an action says, or an observation."""
        metadata = event.record("tool_call_metadata") if event.get("tool_call_metadata") else None
        if action := event.text("action"):
            self._act(event, action, metadata)
        elif observation := event.text("observation"):
            self._observe(event, observation, metadata)

    def _act(self, event: Record, action: str, metadata: Record | None) -> None:
        args, by_user = event.record("args"), event.text("source") == "user"
        thought = _text(args.get("content") or args.get("thought"))
        if metadata is not None and not by_user:
            response = metadata.record("model_response")
            message = _answer(response, "tool_call_metadata.model_response")
            # Each call of a response is an action of its own. Not every server gives its responses ids of their own.
            if (key := (response.text("id"), message)) not in self._responses:
                self._responses.add(key)
                say(self.tree, message, self._policy)
        elif action == "system":
            self.tree.tools = self.tree.tools or tools_of(args.get("tools"))
            say(self.tree, Message(role="system", content=thought), None)
        elif action == "message":
            message = Message(role="user" if by_user else "assistant", content=thought)
            say(self.tree, message, None if by_user else self._policy)
        elif by_user and action == "run":
            asked = f"User executed the command:\n{_text(args.get('command'))}"
            say(self.tree, Message(role="user", content=asked), None)
        elif event.text("source") == "agent" and action in _OLD_ACTIONS:
            self._reconstruct_call(args, action)

    def _reconstruct_call(self, args: Record, action: str) -> None:
        given = {_RENAMED.get(name, name): value for name, value in args.fields.items()}
        arguments = {"command": "view"} if action == "read" else {}
        wanted = {"thought"} if action == "think" else _PARAMETERS
        arguments |= {name: value for name, value in given.items() if name in wanted}
        name = f"call_{len(self.tree.nodes)}"
        call = ToolCall(id=name, name=_OLD_ACTIONS[action], arguments=to_json(arguments).decode())
        thought = None if action == "think" else _text(args.get("thought"))
        thought = None if thought in ("", "null") else thought
        metadata: JsonObject = {"calls": "made from the action; the response is not in the record"}
        say(self.tree, Message(role="assistant", content=thought, tool_calls=(call,)), self._policy, metadata)
        self._pending = call

    def _observe(self, event: Record, observation: str, metadata: Record | None) -> None:
        if observation in _SILENT and metadata is None:
            return
        text = _observation_text(event, observation)
        pending, self._pending = self._pending, None
        if metadata is not None:
            called, name = metadata.text("tool_call_id"), metadata.text("function_name")
            result = Message(role="tool", content=text, tool_call_id=called, name=name)
        elif pending is not None:
            result = Message(role="tool", content=text, tool_call_id=pending.id, name=pending.name)
        elif observation == "run":
            result = Message(role="user", content=f"\nObserved result of command executed by user:\n{text}")
        else:
            result = Message(role="user", content=text)
        say(self.tree, result, None)


def _answer(response: Record, at: str) -> RecordMessage:
    """The message of a chat completion. Raises ``ExchangeError``."""
    choices = response.records("choices")
    if not choices:
        raise ExchangeError(f"{at}.choices: is empty")
    with within(f"{at}.choices.message"):
        return chat_message(choices[0].get("message"))


def _observation_text(event: Record, observation: str) -> str:
    content, extras = event.text("content"), event.record("extras").fields
    match observation:
        case "run":
            return shell_result(content, object_at(extras, "metadata") or extras)
        case "run_ipython":
            shown = "![image](data:image/png;base64, ...) already displayed to user"
            lines = content.split("\n")
            return "\n".join(shown if "![image](data:image/png;base64," in line else line for line in lines)
        case "error":
            return f"{content}\n[Error occurred in processing last action]"
        case "user_rejected":
            return f"OBSERVATION:\n{content}\n[Last action has been rejected by the user]"
        case "delegate":
            return _text(at_path(extras, "outputs", "content")) or content
        case _:
            return content


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


_SHELL = {"execute_bash", "execute_powershell", "terminal"}


def _history(trajectory: Trajectory, messages: Sequence[Message]) -> list[JsonValue]:
    """The events, numbered; the first has the time at which the episode started and the last that of its end."""
    events: list[JsonObject] = []
    # Calls by their ids, each with the metadata of its events.
    asked: dict[str, tuple[ToolCall, JsonObject]] = {}
    for number, message in enumerate(messages):
        content = message.content or ""
        event: JsonObject = {"source": "user" if message.role == "user" else "agent", "message": content}
        match message.role:
            case "system":
                args: JsonObject = {"tools": [*trajectory.tools], "agent_class": trajectory.strategy.name}
                events.append({**event, "action": "system", "args": {"content": content, **args}})
            case "tool":
                call, metadata = asked.get(message.tool_call_id or "", (None, None))
                about: JsonObject = {"observation": "mcp", "extras": {"name": message.name or "", "arguments": {}}}
                if call is not None and call.name in _SHELL:
                    command = _text((arguments_object(call.arguments) or {}).get("command"))
                    extras: JsonObject = {"command": command, "metadata": {"exit_code": -1}, "hidden": False}
                    about = {"observation": "run", "extras": extras}
                held = present(tool_call_metadata=metadata)
                events.append({"source": "agent", "message": "", "content": content, **held, **about})
            case _ if message.tool_calls:
                response = response_of(f"{trajectory.id}-{number}", trajectory.policy.served_name, wire_of(message))
                for call in message.tool_calls:
                    metadata = {"function_name": call.name, "tool_call_id": call.id, "model_response": response}
                    metadata["total_calls_in_response"] = len(message.tool_calls)
                    asked[call.id] = (call, metadata)
                    action, args = _action(call)
                    args = {**args, "thought": content}
                    events.append({**event, "action": action, "args": args, "tool_call_metadata": metadata})
            case _:
                args = {"content": content, "image_urls": None, "file_urls": None, "wait_for_response": False}
                events.append({**event, "action": "message", "args": args})
    times = trajectory.times
    step = (times.finished - times.started) / max(1, len(events) - 1)
    stamps = (date_of(times.started + number * step).replace(tzinfo=None) for number in range(len(events)))
    return [{"id": at, "timestamp": next(stamps).isoformat(), **event} for at, event in enumerate(events)]


def _action(call: ToolCall) -> tuple[str, JsonObject]:
    """The action of a call and its arguments."""
    arguments = arguments_object(call.arguments) or {}
    if call.name in _SHELL and isinstance(command := arguments.get("command"), str):
        return "run", {"command": command, "is_input": arguments.get("is_input") in (True, "true")}
    if call.name == "finish":
        return "finish", {"final_thought": _text(arguments.get("message")), "outputs": {}}
    return "call_tool_mcp", {"name": call.name, "arguments": arguments}


def response_of(identity: str, model: str, message: JsonValue, finish: str = "tool_calls", at: int = 0) -> JsonObject:
    """The chat completion with this answer."""
    choice: JsonObject = {"index": 0, "finish_reason": finish, "message": message}
    return {"id": identity, "object": "chat.completion", "created": at, "model": model, "choices": [choice]}


_TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """An instance with its history or its result, or a history alone."""
    known = not {"history", "test_result"}.isdisjoint(row) if "instance_id" in row else "history" in row
    return known and "messages" not in row and "trajectory" not in row


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row. Raises ``LeftOutError`` without a message."""
    messages = spoken(trajectory, transcript_nodes(trajectory))
    if not messages:
        raise LeftOutError("there is no message in it")
    judged, held = resolved(trajectory, scores), object_at(trajectory.evidence, "test_result")
    test_result: JsonObject = {**held, "git_patch": patch_of(trajectory) or ""}
    usage: JsonObject = {
        "model": trajectory.policy.served_name,
        "prompt_tokens": trajectory.usage.prompt_tokens,
        "completion_tokens": trajectory.usage.completion_tokens,
        "cache_read_tokens": trajectory.usage.cached_tokens,
    }
    if judged is not None and "report" not in test_result:
        test_result["report"] = {"resolved": judged, "empty_generation": not test_result["git_patch"]}
    row: JsonObject = {
        "instance_id": trajectory.task.id,
        "test_result": test_result,
        "instruction": trajectory.task.instruction,
        # The harness requires each of these, if only as an empty value.
        "metadata": {
            "agent_class": trajectory.strategy.name,
            "llm_config": {"model": trajectory.policy.served_name},
            "max_iterations": trajectory.task.limits.max_turns if trajectory.task.limits else len(trajectory.nodes),
            "eval_output_dir": trajectory.run_id,
            "start_time": date_of(trajectory.times.started).strftime("%Y-%m-%d %H:%M:%S"),
            "git_commit": "",
            "dataset": trajectory.task.environment,
            "data_split": trajectory.task.split,
            "details": {"trajectory_id": trajectory.id, "stop": trajectory.stop.value},
        },
        "history": _history(trajectory, messages),
        "metrics": {"accumulated_token_usage": usage},
        "instance": trajectory.task.data,
        "run_id": trajectory.run_id,
    }
    yield row if trajectory.failure is None else {**row, "error": trajectory.failure.message}


def read(row: JsonObject) -> Imported:
    """An episode of a row: an instance of a run, or the events of a saved trajectory. Raises ``ExchangeError``."""
    record = Record(row)
    history, error = record.read(list, "history") or [], record.text("error")
    test_result = object_at(row, "test_result")
    if not history and not test_result and not error:
        raise ExchangeError("history: is required, or test_result or error of an instance that was not run")
    metadata, data = record.record("metadata"), without_nulls(record.record("instance").fields)
    for name in _TEST_LISTS:
        with suppress(ExchangeError):
            data |= {name: from_text(data[name])} if isinstance(data.get(name), str) else {}
    model = metadata.record("llm_config").text("model") or metadata.record("llm").text("model")
    policy = policy_of(model)
    if any(isinstance(event, dict) and "kind" in event for event in history):
        tree = read_log(history, policy).tree
    else:
        tree = read_history(history, policy)
    task = task_of(tree.messages(), SWE, record.read(str, "instance_id"))
    asked = record.text("instruction") or str(data.get("problem_statement") or task.instruction)
    about = {"instruction": asked, "data": data, "split": metadata.text("data_split")}
    # ``update_output_with_eval`` puts the report beside the result.
    report = object_at(test_result, "report") or record.record("report").fields
    result = {**test_result, "report": report} if test_result or "report" in record.fields else None
    judged = report.get("resolved")
    stop, failure = _ending(error)
    return finished(
        tree,
        "output-jsonl",
        task.model_copy(update=about),
        stop,
        model=model,
        run_id=record.text("run_id") or metadata.text("eval_output_dir"),
        evidence=present(test_result=result, metrics=record.get("metrics")),
        resolved=judged if isinstance(judged, bool) else None,
        failure=failure,
        times=times_of(at_path(event, "timestamp") for event in history),
    )


def _ending(error: str) -> tuple[StopReason | None, Failure | None]:
    """OpenHands' own limits are regular ends; any other error makes the episode no valid sample."""
    words = error.lower()
    if not error:
        return None, None
    if "maximum iteration" in words:
        return StopReason.MAX_TURNS, None
    if "maximum budget" in words or "stuck in a loop" in words or "stuckinloop" in words:
        return StopReason.TRUNCATED, None
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message=error[:500], boundary="openhands.evaluation")
    return StopReason.ERROR, failure


def recognises_completion(row: Mapping[str, JsonValue]) -> bool:
    """The messages of a call, and the response to it."""
    return isinstance(row.get("messages"), list) and isinstance(row.get("response"), dict)


def completion_files(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[tuple[str, JsonObject]]:
    """A file of ``llm_completions`` for each sampled node, in the native form: its whole prompt, and the response.

    Raises ``LeftOutError`` when nothing was sampled.
    """
    sampled = [index for index, node in enumerate(trajectory.nodes) if node.sampled]
    if not sampled:
        raise LeftOutError("nothing was sampled in it")
    span = trajectory.times.finished - trajectory.times.started
    for number, index in enumerate(sampled):
        node = trajectory.nodes[index]
        model = (node.policy or trajectory.policy).served_name
        at = trajectory.times.started + span * number / len(sampled)
        *prompt, answer = conversation_of(trajectory, trajectory.path(index))
        finish = node.finish_reason or ("tool_calls" if node.message.tool_calls else "stop")
        row: JsonObject = {
            "messages": prompt,
            "response": response_of(f"{trajectory.id}-{index}", model, answer, finish, int(at)),
            "args": [],
            "kwargs": {"tools": [*trajectory.tools]} if trajectory.tools else {},
            "timestamp": at,
            "cost": None,
        }
        yield f"{safe_name(trajectory.task.id)}/{trajectory.id}/{safe_name(model)}-{number:05d}.json", row


def read_folder(path: Path) -> Units:
    """``llm_completions`` itself, or the folder of one instance."""
    folders: dict[Path, list[Path]] = {}
    for file in files_below(path, (".json",)):
        folders.setdefault(file.parent, []).append(file)
    return (Unit(str(each), partial(_read_completions, each.name, own)) for each, own in sorted(folders.items()))


class _Call(NamedTuple):
    """A call of the model; ``text`` is its answer where calls were prompted and written as text."""

    at: float
    prompt: Sequence[Message]
    answer: Message
    text: str | None
    model: str | None
    tools: tuple[JsonObject, ...]


def _read_completions(instance: str, files: Sequence[Path]) -> Imported:
    # Files are named after the time, which is not a number of fixed length.
    calls = sorted(map(_read_call, files), key=lambda call: call.at)
    tree, answers = EpisodeTree(), list[int]()
    model: str | None = None
    for call in calls:
        model, tree.tools = call.model or model, tree.tools or call.tools
        at: int | None = None
        for message in call.prompt:
            at = _follow(tree, at, message)
        tree.head = at
        answers.append(say(tree, call.answer, policy_of(model), present(text=call.text)))
    # Others than the conversation with the most calls are a condenser's.
    roots = [tree.path(at)[0] for at in answers]
    main = Counter(roots).most_common(1)[0][0]
    tree.head = [at for at, root in zip(answers, roots, strict=True) if root == main][-1]
    path = set(tree.path())
    for at, node in enumerate(tree.nodes):
        if at not in path and tree.path(at)[0] != main:
            node.metadata[KIND] = CONDENSATION
        elif at not in path and node.sampled:
            # The host went on from it.
            node.metadata[ACTED] = True
    task, times = task_of(tree.messages(), SWE, instance), Times(started=calls[0].at, finished=calls[-1].at)
    return finished(tree, "llm-completions", task, model=model, evidence={"calls": len(calls)}, times=times)


def _read_call(file: Path) -> _Call:
    record = Record(read_document(file))
    with within(str(file)):
        # V1's SDK calls the native form raw_messages and response, and the text of the model raw_response.
        v1 = {"raw_messages", "raw_response"} <= record.fields.keys()
        written = record.record("raw_response" if v1 else "response")
        native = record.record("response" if v1 else "fncall_response")
        response, shown = native if native.fields else written, record.messages("messages")
        answer, text = _answer(response, "response"), None
        if native.fields and written.records("choices"):
            text = _answer(written, "response").content
        kwargs, tools = record.record("kwargs"), record.get("tools")
        if "tools" in kwargs.fields:
            offered = tools_of(kwargs.get("tools"))
        elif isinstance(tools, list) and not native.fields:
            offered = tuple(read_tool(tool) for tool in tools if isinstance(tool, dict))
        else:
            # A text prompt has them in its system message.
            offered = read_system_prompt(shown[0].content or "").tools if shown else ()
        prompt = record.messages("raw_messages" if v1 else "fncall_messages") or shown
        model = kwargs.text("model") or response.text("model")
        return _Call(times_of([record.get("timestamp")]).started, prompt, answer, text, model, offered)


def _follow(tree: EpisodeTree, at: int | None, message: Message) -> int:
    """The node below ``at`` that says ``message``: a known one, or a new one."""
    same = next((child for child in reversed(tree.children(at)) if _alike(tree.nodes[child].message, message)), None)
    if same is None:
        tree.head = at
        return say(tree, message, None)
    if (node := tree.nodes[same]).sampled and node.message != (plain := plain_message(message)):
        node.metadata["replayed_as"] = plain.model_dump(mode="json", exclude_defaults=True)
    return same


def _alike(known: Message, message: Message) -> bool:
    """Equal, but for white space around the text and an empty text that is null elsewhere."""
    return (
        known.role == message.role
        and known.tool_calls == message.tool_calls
        and known.tool_call_id == message.tool_call_id
        and (known.content or "").strip() == (message.content or "").strip()
    )
