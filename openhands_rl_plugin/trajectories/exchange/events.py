"""Logs of agents. What OpenHands stores: V0's ``output.jsonl`` and saved trajectories, V1's conversations, completion
logs of both; and Harbor's ATIF.

In events of V0 an agent's action holds the model's whole response, so answers and calls are exact; actions of releases
that kept none are refused. Observations are worded as OpenHands words them for the model. Not in the events, and so
lost: text that OpenHands renders from its own templates (workspace context, microagents), pictures, what a condenser
made of the history, and answers that were no valid action. Written, every call is an action with the whole response
in its ``tool_call_metadata``: ``run`` for ``execute_bash`` and V1's ``terminal``, ``finish``, and ``call_tool_mcp`` for
any other function, because that one carries arbitrary arguments.

Conversations of the V1 SDK are folders with an event a file, or files of events. Read, answers and calls are exact.
Events of newer SDKs name the one before them, so a conversation that was taken up again elsewhere becomes a branch; so
does one that goes on from a condenser's summary. Not in the events: the parameters of the tools, and the prompts of
summaries.

``llm_completions`` has a folder an instance, in it a file a call of the model. All calls of an instance become one
tree: a prompt that extends the one before continues its path, and where the host rewrote the history (a condenser, a
changed prompt) a branch begins. A condenser's own calls are separate paths. V0's model that was prompted with text has
calls and tools in the text; V1's logs have the calls in native form as well, and those are read.

Tokens, rewards and answers that were not executed have no place in any of them.

ATIF, the Agent Trajectory Interchange Format, goes both ways, with token ids and logprobs. Written is ATIF-v1.8, in
which unknown fields are forbidden; read is every version. A step's ``metrics`` have the whole prompt's ids, those of
the answer, and a logprob for each of these. What ATIF has no field for (the task, the judgement, rewards of steps,
arguments as they were written) stands in ``extra``, so our own files are read back without loss.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.arrays import Ids
from openhands_rl_plugin.core.judgements import patch_of, resolved, score_of
from openhands_rl_plugin.core.messages import plain_message, reasoning_of, text_of, transcript_nodes
from openhands_rl_plugin.core.records import sub_agents_run
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    ACTED,
    CONDENSATION,
    KIND,
    Completion,
    Failure,
    FailureKind,
    JsonObject,
    Message,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    SWE,
    UNKNOWN,
    ExchangeError,
    Imported,
    LeftOutError,
    Record,
    RecordMessage,
    Unit,
    Units,
    add_message,
    arguments_object,
    at_path,
    chat_message,
    conversation,
    conversation_of,
    date_of,
    files_below,
    finished,
    follow,
    object_at,
    policy_of,
    present,
    read_document,
    rows_of,
    spoken_messages,
    task_of,
    times_of,
    tools_of,
    wire_of,
    within,
    without_nulls,
)

# --- Events of V0


def read_v0(record: Record) -> Imported:
    """An episode of a row: an instance of a run, or the events of a saved trajectory. Raises ``ExchangeError``."""
    history, error = record.read(list, "history") or [], record.text("error")
    test_result, metadata = object_at(record.get("test_result")), record.record("metadata")
    if not history and not test_result and not error:
        raise ExchangeError("history: is required, or test_result or error of an instance that was not run")
    model = metadata.record("llm_config").text("model") or metadata.record("llm").text("model")
    of_sdk = any("kind" in event for event in history if isinstance(event, dict))
    tree = read_events(history, policy_of(model)) if of_sdk else read_history(history, model)
    task, data = task_of(tree.messages(), SWE, record.read(str, "instance_id")), record.record("instance").fields
    instruction = record.text("instruction") or str(data.get("problem_statement") or task.instruction)
    about = {"instruction": instruction, "data": without_nulls(data), "split": metadata.text("data_split")}
    # ``update_output_with_eval`` writes the report next to the result.
    report = object_at(test_result, "report") or record.record("report").fields
    judged, (stop, failure) = report.get("resolved"), _ending_of_v0(error)
    return finished(
        tree,
        "output-jsonl",
        task.model_copy(update=about),
        stop,
        model=model,
        run_id=record.text("run_id") or metadata.text("eval_output_dir"),
        evidence=present(
            test_result={**test_result, "report": report} if test_result or report else None,
            metrics=record.get("metrics"),
        ),
        resolved=judged if isinstance(judged, bool) else None,
        failure=failure,
        times=times_of(at_path(event, "timestamp") for event in history),
    )


def _ending_of_v0(error: str) -> tuple[StopReason | None, Failure | None]:
    """OpenHands' own limits are regular ends; any other error makes the episode no valid sample."""
    words = error.lower()
    if not error:
        return None, None
    if "maximum iteration" in words:
        return StopReason.MAX_TURNS, None
    if "maximum budget" in words or "stuck in a loop" in words or "stuckinloop" in words:
        return StopReason.TRUNCATED, None
    return StopReason.ERROR, _failure(error, "openhands.evaluation")


def _failure(message: str, boundary: str) -> Failure:
    return Failure(kind=FailureKind.INFRASTRUCTURE, message=message[:500], boundary=boundary)


def read_history(history: Sequence[JsonValue], model: str | None) -> EpisodeTree:
    """The events of V0. Raises ``ExchangeError`` that names the event."""
    messages: list[Message] = []
    tools: tuple[JsonObject, ...] = ()
    answers: set[tuple[str, RecordMessage]] = set()
    for number, each in enumerate(history):
        with within(f"history[{number}]"):
            event = Record(each)
            if event.text("action") == "system":
                tools = tools or tools_of(event.record("args").get("tools"))
            messages += _of_v0(event, answers)
    return conversation(messages, model, tools)


_SILENT = {"agent_state_changed", "null", "recall", "loop_detection", "success"}
_CALLED = {"run", "run_ipython", "read", "edit"}


def _of_v0(event: Record, answers: set[tuple[str, RecordMessage]]) -> Iterator[Message]:
    """Yield the messages that an event adds to the prompt; ``answers``: the completions before it."""
    args, metadata = event.record("args"), event.record("tool_call_metadata")
    action, observation, by_user = event.text("action"), event.text("observation"), event.text("source") == "user"
    if action and metadata.fields and not by_user:
        response = metadata.record("model_response")
        message = _answer(response, "tool_call_metadata.model_response")
        # Each call of a response is an action of its own. Not every server gives its responses ids of their own.
        if (key := (response.text("id"), message)) not in answers:
            answers.add(key)
            yield message
    elif action in ("system", "message"):
        role = "system" if action == "system" else "user" if by_user else "assistant"
        yield Message(role=role, content=args.text("content"))
    elif action == "run" and by_user:
        yield Message(role="user", content=f"User executed the command:\n{args.text('command')}")
    elif action in _CALLED and event.text("source") == "agent":
        raise ExchangeError("tool_call_metadata: is required: without it nobody knows which call of the model made it")
    elif observation and metadata.fields:
        called, name = metadata.text("tool_call_id"), metadata.text("function_name")
        yield Message(role="tool", content=_observed(event, observation), tool_call_id=called, name=name)
    elif observation and observation not in _SILENT:
        begin = "\nObserved result of command executed by user:\n" if observation == "run" else ""
        yield Message(role="user", content=f"{begin}{_observed(event, observation)}")


def _answer(response: Record, at: str) -> RecordMessage:
    """The message of a chat completion. Raises ``ExchangeError``."""
    choices = response.records("choices")
    if not choices:
        raise ExchangeError(f"{at}.choices: is empty")
    with within(f"{at}.choices.message"):
        return chat_message(choices[0].get("message"))


_WORDED = {
    "error": "{}\n[Error occurred in processing last action]",
    "user_rejected": "OBSERVATION:\n{}\n[Last action has been rejected by the user]",
}


def _observed(event: Record, observation: str) -> str:
    content, extras = event.text("content"), event.record("extras").fields
    if observation == "run":
        return _shell_result(content, object_at(extras, "metadata") or extras)
    if observation == "run_ipython":
        shown = "![image](data:image/png;base64, ...) already displayed to user"
        return re.sub(r".*!\[image\]\(data:image/png;base64,.*", shown, content)
    if observation == "delegate":
        content = str(at_path(extras, "outputs", "content") or content)
    return _WORDED.get(observation, "{}").replace("{}", content)


def _shell_result(text: str, metadata: JsonObject) -> str:
    """The result of a command as the model is shown it, with what OpenHands notes on it."""
    notes = {"working_dir": "Current working directory: ", "py_interpreter_path": "Python interpreter: "}
    written = [f"\n[{note}{metadata[name]}]" for name, note in notes.items() if metadata.get(name)]
    if (code := metadata.get("exit_code")) not in (None, -1):
        written.append(f"\n[Command finished with exit code {code}]")
    return f"{metadata.get('prefix') or ''}{text}{metadata.get('suffix') or ''}{''.join(written)}"


def v0_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row. Raises ``LeftOutError`` without a message."""
    judged, patch = resolved(trajectory, scores), patch_of(trajectory) or ""
    test_result: JsonObject = {"git_patch": patch, **object_at(trajectory.evidence, "test_result")}
    if judged is not None:
        test_result = {"report": {"resolved": judged, "empty_generation": not patch}, **test_result}
    model, limits = trajectory.policy.served_name, trajectory.task.limits
    metadata = v0_metadata(
        agent_class=trajectory.strategy.name,
        llm_config={"model": model},
        max_iterations=limits.max_turns if limits else len(trajectory.nodes),
        eval_output_dir=trajectory.run_id,
        started=trajectory.times.started,
        dataset=trajectory.task.environment,
        data_split=trajectory.task.split,
        details={"trajectory_id": trajectory.id, "stop": trajectory.stop.value},
    )
    row = v0_row(trajectory, metadata, test_result)
    if not row["history"]:
        raise LeftOutError("there is no message in it")
    failure = trajectory.failure
    yield {**row, "run_id": trajectory.run_id, **present(error=failure and failure.message)}


def v0_metadata(*, started: float, **settings: JsonValue) -> JsonObject:
    """The ``EvalMetadata`` of OpenHands' harness, which requires all of its fields, if only as empty values."""
    start = date_of(started).strftime("%Y-%m-%d %H:%M:%S")
    return {**settings, "start_time": start, "git_commit": ""}


def v0_row(
    trajectory: Trajectory, metadata: JsonObject, test_result: JsonObject, *, cost: float | None = None
) -> JsonObject:
    """The ``EvalOutput`` of OpenHands' harness, without an error."""
    model, usage = trajectory.policy.served_name, trajectory.usage
    counts: JsonObject = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cache_read_tokens": usage.cached_tokens,
        **dict.fromkeys(("cache_write_tokens", "context_window", "per_turn_token"), 0),
    }
    return {
        "instance_id": trajectory.task.id,
        "test_result": test_result,
        "instruction": trajectory.task.instruction,
        "metadata": metadata,
        "history": [*v0_history(trajectory)],
        "metrics": {
            "accumulated_cost": cost or 0.0,
            "accumulated_token_usage": {"model": model, "response_id": "", **counts},
        },
        "instance": trajectory.task.data,
    }


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


_SHELL = {"execute_bash", "execute_powershell", "terminal"}


def v0_history(trajectory: Trajectory) -> list[JsonObject]:
    """The events, numbered; what a rewritten history repeats is there once. The first has the time at which the episode
    started, and the last that of its end."""
    events = [*_events_of_v0(trajectory)]
    started, step = (
        trajectory.times.started,
        (trajectory.times.finished - trajectory.times.started) / (len(events) - 1 or 1),
    )
    dates = (date_of(started + at * step).replace(tzinfo=None).isoformat() for at in range(len(events)))
    return [{"id": at, **event, "timestamp": date} for at, (event, date) in enumerate(zip(events, dates, strict=True))]


def _events_of_v0(trajectory: Trajectory) -> Iterator[JsonObject]:
    # Calls by their ids, each with the metadata of its events.
    called: dict[str, tuple[ToolCall, JsonObject]] = {}
    for number, message in enumerate(spoken_messages(trajectory, transcript_nodes(trajectory))):
        content = message.content or ""
        event: JsonObject = {"source": "user" if message.role == "user" else "agent", "message": content}
        if message.role == "tool":
            call, metadata = called.get(message.tool_call_id or "", (None, None))
            about: JsonObject = {"observation": "mcp", "extras": {"name": message.name or "", "arguments": {}}}
            if call is not None and call.name in _SHELL:
                command = str((arguments_object(call.arguments) or {}).get("command"))
                extras: JsonObject = {"command": command, "metadata": {"exit_code": -1}, "hidden": False}
                about = {"observation": "run", "extras": extras}
            yield {**event, "message": "", "content": content, **about, **present(tool_call_metadata=metadata)}
        elif message.role == "system":
            args: JsonObject = {"tools": [*trajectory.tools], "agent_class": trajectory.strategy.name}
            yield {**event, "action": "system", "args": {"content": content, **args}}
        elif not message.tool_calls:
            args = {"content": content, "image_urls": None, "file_urls": None, "wait_for_response": False}
            yield {**event, "action": "message", "args": args}
        else:
            response = _response_of(f"{trajectory.id}-{number}", trajectory.policy.served_name, wire_of(message))
            for call in message.tool_calls:
                about = {"function_name": call.name, "tool_call_id": call.id, "model_response": response}
                about["total_calls_in_response"] = len(message.tool_calls)
                called[call.id] = (call, about)
                action, args = _action(call)
                yield {**event, "action": action, "args": {**args, "thought": content}, "tool_call_metadata": about}


def _action(call: ToolCall) -> tuple[str, JsonObject]:
    """The action of a call and its arguments."""
    arguments = arguments_object(call.arguments) or {}
    if call.name in _SHELL and isinstance(command := arguments.get("command"), str):
        return "run", {"command": command, "is_input": arguments.get("is_input") in (True, "true")}
    if call.name == "finish":
        return "finish", {"final_thought": str(arguments.get("message") or ""), "outputs": {}}
    return "call_tool_mcp", {"name": call.name, "arguments": arguments}


def _response_of(identity: str, model: str, message: JsonValue, finish: str = "tool_calls", at: int = 0) -> JsonObject:
    """The chat completion with this answer."""
    choice: JsonObject = {"index": 0, "finish_reason": finish, "message": message}
    return {"id": identity, "object": "chat.completion", "created": at, "model": model, "choices": [choice]}


# --- Completion logs


def completion_files(trajectory: Trajectory) -> Iterator[tuple[str, JsonObject]]:
    """The name and the content of a file of ``llm_completions`` for each sampled node: its whole prompt, and the
    response, in the native form."""
    sampled = [index for index, node in enumerate(trajectory.nodes) if node.sampled]
    span = trajectory.times.finished - trajectory.times.started
    for number, index in enumerate(sampled):
        node = trajectory.nodes[index]
        model = (node.policy or trajectory.policy).served_name
        at = trajectory.times.started + span * number / len(sampled)
        *prompt, answer = conversation_of(trajectory, trajectory.path(index))
        finish = node.finish_reason or ("tool_calls" if node.message.tool_calls else "stop")
        row: JsonObject = {
            "messages": prompt,
            "response": _response_of(f"{trajectory.id}-{index}", model, answer, finish, int(at)),
            "args": [],
            "kwargs": {"tools": [*trajectory.tools]} if trajectory.tools else {},
            "timestamp": at,
            "cost": None,
        }
        yield f"{re.sub(r'[^\w.@+=-]', '__', model).lstrip('.')[:200]}-{number:05d}.json", row


def read_completions(path: Path) -> Units:
    """``llm_completions`` itself, or the folder of one instance."""
    folders: dict[Path, list[Path]] = {}
    for file in files_below(path, (".json",)):
        folders.setdefault(file.parent, []).append(file)
    return (Unit(str(each), partial(_from_calls, each.name, own)) for each, own in sorted(folders.items()))


def _from_calls(instance: str, files: Sequence[Path]) -> Imported:
    # Files are named after the time, which is not a number of fixed length.
    calls = sorted(map(_read_call, files), key=lambda call: call[0])
    # Other conversations than the one with the most calls are a condenser's.
    main = Counter(prompt[0] for _, prompt, *_ in calls).most_common(1)[0][0]
    tree, model = EpisodeTree(), None
    for _, prompt, answer, named, tools in calls:
        model = named or model
        if prompt[0] != main:
            summary = Completion(message=plain_message(answer), policy=policy_of(model))
            tree.add_side_completion([*map(plain_message, prompt)], summary, CONDENSATION)
            continue
        tree.tools = tree.tools or tools
        follow(tree, prompt)
        add_message(tree, answer, policy_of(model))
    _mark_acted(tree, {*range(len(tree.nodes))} - {*tree.path()})  # the host went on from them
    task, times = task_of(tree.messages(), SWE, instance), Times(started=calls[0][0], finished=calls[-1][0])
    return finished(tree, "llm-completions", task, model=model, evidence={"calls": len(calls)}, times=times)


def _mark_acted(tree: EpisodeTree, left: Iterable[int]) -> None:
    """Note that answers which are not on the path were executed, too."""
    for node in (tree.nodes[at] for at in left):
        if node.sampled and KIND not in node.metadata:
            node.metadata[ACTED] = True


def _read_call(file: Path) -> tuple[float, Sequence[Message], Message, str, tuple[JsonObject, ...]]:
    """When it was, its prompt and answer, the model, and the tools."""
    record = Record(read_document(file))
    with within(str(file)):
        kwargs, response = record.record("kwargs"), record.record("response")
        answer = _answer(response, "response")
        # Of a model that V1 prompts with text ``messages`` has the text.
        if not (prompt := record.messages("raw_messages") or record.messages("messages")):
            raise ExchangeError("messages: is empty")
        at, model = times_of([record.get("timestamp")]).started, kwargs.text("model") or response.text("model")
        return at, prompt, answer, model, tools_of(kwargs.get("tools") or record.get("tools"))


# --- Events of V1

V1_EVENTS = "v1-events"
_STATE, _EVENTS, _SUB_AGENTS = "base_state.json", "events", "subagents"
_RESULTS = {"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
V1_FIELDS = ("kind source",)


def read_conversations(path: Path) -> Units:
    """A conversation's folder, a folder of such folders, or files with all events of a conversation each."""
    if folders := conversations(path):
        # The names are numbered with leading zeros.
        listed = ((each, each.name, sorted((each / _EVENTS).glob("event-*.json"))) for each in folders)
        return (Unit(str(found[0]), partial(_episode, *found)) for found in listed)
    return (Unit(str(file), partial(_from_file, file)) for file in files_below(path, (".jsonl", ".json", ".jsonl.gz")))


def conversations(path: Path) -> list[Path]:
    """The folders of stored conversations of V1 at or below a folder."""
    return sorted(each.parent for each in path.rglob(_EVENTS) if each.is_dir())


def _from_file(file: Path) -> Imported:
    name = re.sub(r"\.(json|jsonl)(\.gz)?$", "", file.name)
    return _episode(file.parent, name if name != _EVENTS else file.absolute().parent.name, [file])


def _episode(folder: Path, name: str, files: Sequence[Path]) -> Imported:
    events: list[JsonObject] = [row.read() for file in files for row in rows_of(file)]
    if not any(str(event.get("kind")).endswith(("Event", "Condensation")) for event in events):
        raise ExchangeError("there is no event of OpenHands' SDK in it")
    # Secrets and settings in it are not read.
    state = Record(read_document(folder / _STATE) if (folder / _STATE).is_file() else {})
    model = state.record("agent").record("llm").read(str, "model")
    tree = read_events(events, policy_of(model), state.read(str, "leaf_event_id"))
    # Sub-agents are no samples of the run's tasks.
    run_id = sub_agents_run(UNKNOWN) if folder.parent.name == _SUB_AGENTS else None
    stop = {"stuck": StopReason.TRUNCATED, "finished": StopReason.TERMINATED}.get(state.text("execution_status"))
    errors = [Record(event) for event in events if event.get("kind") == "ConversationErrorEvent"]
    failure: Failure | None = None
    # A conversation that went on after an error is no failure.
    if errors and stop is None:
        code, stop = errors[-1].text("code"), StopReason.MAX_TURNS
        if code != "MaxIterationsReached":
            failure = _failure(f"{code}: {errors[-1].text('detail')}", "openhands.conversation")
            stop = StopReason.ERROR
    condensed = sum(event.get("kind") == "Condensation" for event in events)
    return finished(
        tree,
        V1_EVENTS,
        task_of(tree.messages(), "openhands", state.text("id") or name),
        stop,
        model=model,
        run_id=run_id,
        evidence=present(condensations=condensed or None),
        failure=failure,
        times=times_of(event.get("timestamp") for event in events),
    )


def read_events(events: Sequence[JsonValue], policy: PolicyRef, leaf: str | None = None) -> EpisodeTree:
    """The events of V1 in order; ``leaf`` is the one at which the conversation stands, by default the last one.

    Raises ``ExchangeError`` that names the event.
    """
    tree = EpisodeTree()
    # Event -> the node at which the conversation stood after it; completion -> its node; node -> its events.
    places: dict[str, int | None] = {}
    answers: dict[str, int] = {}
    events_of: dict[int, list[str]] = {}
    for number, each in enumerate(events):
        with within(f"event {number}"):
            event = Record(each)
            if (parent := event.text("parent_id")) in places:
                tree.head = places[parent]
            identity, completion, message = event.text("id"), event.text("llm_response_id"), _of_v1(event)
            if event.text("kind") == "Condensation":
                _condense(tree, event, events_of)
            elif message is not None:
                at = answers.get(completion)
                if message.tool_calls and at is not None and at in tree.path():
                    # Each call of a completion is an event of its own.
                    node = tree.nodes[at]
                    calls = (*node.message.tool_calls, *message.tool_calls)
                    node.message = node.message.model_copy(update={"tool_calls": calls})
                else:
                    at = add_message(tree, message, policy if message.role == "assistant" else None)
                    answers |= {completion: at} if completion else {}
                events_of.setdefault(at, []).append(identity)
                tree.tools = tree.tools or tools_of(event.get("tools"))
            places[identity] = tree.head
    tree.head = places.get(leaf or "", tree.head)
    return tree


def _of_v1(event: Record) -> Message | None:
    """The message that an event adds to the prompt, or ``None``."""
    kind, added = event.text("kind"), _part_texts(event, "extended_content")
    if kind == "SystemPromptEvent":
        parts = (event.record(name).text("text") for name in ("system_prompt", "dynamic_context"))
        return Message(role="system", content=_join(parts) or "")
    if kind == "MessageEvent":
        message = chat_message(_as_wire(event.record("llm_message").fields))
        content = _join([message.content or "", *added]) if added else message.content
        return message.model_copy(update={"content": content})
    if kind in _RESULTS:
        called, name = event.text("tool_call_id"), event.text("tool_name") or None
        return Message(role="tool", content=_join([*_result(event, kind), *added]), tool_call_id=called, name=name)
    if kind != "ActionEvent":
        return None
    if not event.get("tool_call"):
        raise ExchangeError("tool_call: is required")
    # Missing fields of the call are those of the event.
    own: JsonObject = {"id": event.text("tool_call_id"), "name": event.text("tool_name")}
    call: JsonObject = {**own, **without_nulls(event.record("tool_call").fields)}
    wire: JsonObject = {"role": "assistant", "content": _join(_part_texts(event, "thought")), "tool_calls": [call]}
    names = ("reasoning_content", "thinking_blocks", "responses_reasoning_item")
    return chat_message(_as_wire({**wire, **{name: event.get(name) for name in names}}))


def _condense(tree: EpisodeTree, event: Record, events_of: dict[int, list[str]]) -> None:
    """Go on as the SDK does: without the events that are forgotten, and with the summary in their place."""
    nodes, path = tree.nodes, tree.path()
    forgotten, summary = {*map(str, event.read(list, "forgotten_event_ids") or ())}, event.read(str, "summary")
    # The events that the model sees, each with its node; the summary has none yet.
    view: list[tuple[str, int | None]] = []
    view += ((each, at) for at in path for each in events_of.get(at, ()) if each not in forgotten)
    if summary is not None and (offset := event.read(int, "summary_offset")) is not None:
        view.insert(min(offset, len(view)), (f"{event.text('id')}-summary", None))
    kept = [*dict.fromkeys(at for _, at in view)]
    follow(tree, [Message(role="user", content=summary) if at is None else nodes[at].message for at in kept])
    for at, now in zip(kept, tree.path(), strict=True):
        events_of[now] = [each for each, held in view if held == at]
    _mark_acted(tree, {*path} - {*tree.path()})


def _result(event: Record, kind: str) -> list[str]:
    if kind == "AgentErrorEvent":
        return [event.text("error")]
    if kind == "UserRejectObservation":
        return [f"Action rejected: {event.text('rejection_reason')}"]
    observation = event.record("observation")
    text, metadata = text_of(_parts(observation.get("content"))) or "", observation.get("metadata")
    header = ["[An error occurred during execution.]\n"] if observation.get("is_error") else []
    return [*header, _shell_result(text, metadata) if isinstance(metadata, dict) else text]


def _as_wire(message: JsonObject) -> JsonObject:
    """The SDK's message as OpenAI's; it has the reasoning of OpenAI's Responses in an item of its own."""
    blocks, item = message.get("thinking_blocks"), message.get("responses_reasoning_item")
    thoughts = [*_listed(blocks), *([{**item, "type": "reasoning"}] if isinstance(item, dict) else [])]
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


# --- ATIF

ATIF = "atif"
_OWN = "openhands_rl"
"""The key of ``extra`` under which our own fields stand."""

_Ids = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
_Logprobs = tuple[float | None, ...]


def is_trial(file: Path) -> bool:
    """Whether a file is the ``result.json`` of a trial of Harbor, or its settings."""
    trial = file.parent / "agent" / "trajectory.json"
    return file.name in ("result.json", "config.json") and (trial.is_file() or any(file.parent.glob("*/agent")))


def read_atif(record: Record, file: Path | None = None) -> Imported:
    """The episode of a document. A trial of Harbor in the folder above gives the task's name and the reward.

    Raises ``ExchangeError`` that names the step.
    """
    trial = _trial(file)
    own, agent = record.record("extra").record(_OWN), record.record("agent")
    policy = own.read(PolicyRef, "policy") or policy_of(agent.read(str, "model_name"))
    messages: list[RecordMessage] = []
    for number, step in enumerate(record.read(list, "steps") or ()):
        with within(f"steps[{number}]"):
            messages += _of_step(Record(step), policy)
    if not messages:
        raise ExchangeError("steps: is empty")
    tree = conversation(messages, tools=tools_of(agent.get("tool_definitions")))
    names = (trial.text("task_name"), record.text("session_id"), record.text("trajectory_id"))
    score, solved = own.read(float, "score"), own.read(bool, "resolved")
    earned = trial.record("verifier_result").record("rewards").read(float, "reward")
    noted = present(resolved=solved, traj_id=record.read(str, "session_id"), metrics=record.get("final_metrics"))
    return finished(
        tree,
        ATIF,
        own.read(Task, "task") or task_of(tree.messages(), UNKNOWN, *names),
        own.read(StopReason, "stop"),
        model=policy,
        run_id=own.text("run_id") or trial.text("trial_name"),
        group_id=own.read(str, "group_id"),
        evidence={**(own.read(dict, "evidence") or {}), **noted},
        reward=earned if score is None else score,
        resolved=solved,
        times=times_of(at_path(step, "timestamp") for step in record.read(list, "steps") or ()),
        tokens=sum(message.tokens is not None for message in messages) or None,
    )


def _of_step(step: Record, policy: PolicyRef) -> Iterator[RecordMessage]:
    """The step's message, and what was observed after it."""
    text, source = text_of(step.get("message")), step.text("source")
    calls, results = step.records("tool_calls"), step.record("observation").records("results")
    names = {call.text("tool_call_id"): call.text("function_name") for call in calls}
    if source == "agent":
        yield _sampled_in(step, text, calls, policy)
    elif source not in ("system", "user"):
        raise ExchangeError(f"source: must be system, user or agent, not {source!r}")
    elif text is not None and (text or not results):
        yield RecordMessage(role=source, content=text)
    for result in results:
        called = result.read(str, "source_call_id") or (next(iter(names)) if len(names) == 1 else None)
        content = text_of(result.get("content")) or ""
        yield RecordMessage(role="tool", content=content, tool_call_id=called, name=names.get(called or ""))


def _sampled_in(step: Record, text: str | None, calls: Sequence[Record], policy: PolicyRef) -> RecordMessage:
    own = step.record("extra").record(_OWN)
    served = step.read(str, "model_name")
    if served is not None and served != policy.served_name:
        policy = PolicyRef.from_served_name(policy.base_model, served)
        policy = policy if policy.adapter is not None else PolicyRef(base_model=served)
    # Copied context was trained where it first stands; a step without a call of a model was not sampled.
    context_only = step.get("llm_call_count") == 0 or own.get("sampled") is False
    wire = {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": call.text("tool_call_id"), "name": call.text("function_name"), "arguments": _arguments(call)}
            for call in calls
        ],
        "reasoning_content": step.read(str, "reasoning_content"),
        "is_copied_context": context_only or step.read(bool, "is_copied_context"),
    }
    known = {
        "policy": policy,
        "tokens": _tokens(step.record("metrics")),
        "finish_reason": own.read(str, "finish_reason"),
        "reward": own.read(float, "reward"),
    }
    if (empty := own.read(bool, "no_text")) is not None:
        known["content"] = None if empty else ""
    return chat_message(wire).model_copy(update=known)


def _tokens(metrics: Record) -> Tokens | None:
    """Raises ``ExchangeError`` when ids and logprobs do not fit."""
    prompt, sampled = metrics.read(_Ids, "prompt_token_ids"), metrics.read(_Ids, "completion_token_ids")
    if prompt is None or sampled is None:
        return None
    given = [math.nan if each is None else each for each in metrics.read(_Logprobs, "logprobs") or ()]
    logprobs = Tokens.known_logprobs(given, len(given))
    if logprobs and len(logprobs) != len(sampled):
        raise ExchangeError(f"metrics: {len(logprobs)} logprobs for {len(sampled)} completion_token_ids")
    return Tokens.of(prompt, sampled, logprobs)


def _arguments(call: Record) -> JsonValue:
    exact = call.record("extra").get("arguments")
    return exact if isinstance(exact, str) else call.get("arguments")


def _trial(file: Path | None) -> Record:
    """For ``TRIAL/agent/trajectory.json``: the content of ``TRIAL/result.json``, empty if there is none."""
    result = file.parent.parent / "result.json" if file is not None else None
    return Record(read_document(result) if result is not None and result.is_file() else {})


_VERSION = "ATIF-v1.8"


def atif_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """A document for each path that was acted on, one unless the history was rewritten.

    In a later one, what an earlier one has is marked as copied, so that nothing is trained twice. Raises
    ``LeftOutError`` for an episode without a message.
    """
    if trajectory.head is None:
        raise LeftOutError("there is no message in it")
    facts = trajectory.model_dump(mode="json", include={"task", "run_id", "group_id", "policy", "stop", "evidence"})
    facts |= present(score=score_of(trajectory, scores), resolved=resolved(trajectory, scores))
    agent: JsonObject = {
        "name": trajectory.strategy.name,
        "version": version("openhands_rl_plugin"),
        "model_name": trajectory.policy.served_name,
        **present(tool_definitions=[*trajectory.tools] or None),
    }
    seen: set[int] = set()
    for number, end in enumerate(trajectory.ends(), 1):
        path = trajectory.path(end)
        identity = trajectory.id if number == 1 else f"{trajectory.id}-{number}"
        yield {
            "schema_version": _VERSION,
            "session_id": identity,
            "trajectory_id": identity,
            "agent": agent,
            "steps": [*_steps(trajectory, path, seen)],
            "extra": {_OWN: facts},
        }
        seen |= {*path}


def _steps(trajectory: Trajectory, path: Sequence[int], seen: set[int]) -> list[dict[str, Any]]:
    """Results of calls are part of the step that called; the first and the last step have the episode's times."""
    steps: list[dict[str, Any]] = []
    called: set[str] = set()
    context = Ids()
    for at in path:
        node, message = trajectory.nodes[at], trajectory.nodes[at].message
        if node.tokens is not None:
            context = context + node.tokens.prompt_ids if node.tokens.extends else node.tokens.prompt_ids
        if message.role == "tool" and steps and message.tool_call_id in called:
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": message.tool_call_id, "content": message.content or ""})
            continue
        called = {call.id for call in message.tool_calls}
        source = {"assistant": "agent", "system": "system"}.get(message.role, "user")
        step = {"step_id": len(steps) + 1, "source": source, "message": message.content or ""}
        step |= _agent_fields(node, context) if source == "agent" else {}
        steps.append(step | ({"is_copied_context": True} if at in seen else {}))
        if node.tokens is not None:
            context += node.tokens.sampled_ids
    steps[0]["timestamp"] = date_of(trajectory.times.started).isoformat()
    steps[-1]["timestamp"] = date_of(trajectory.times.finished).isoformat()
    return steps


def _agent_fields(node: Node, context: Sequence[int]) -> JsonObject:
    message = node.message
    own = present(
        reward=node.reward,
        finish_reason=node.finish_reason,
        sampled=None if node.sampled else False,
        no_text=None if message.content else message.content is None,
    )
    metrics: JsonObject | None = None
    if node.tokens is not None:
        metrics = {
            "prompt_tokens": len(context),
            "completion_tokens": len(node.tokens.sampled_ids),
            "prompt_token_ids": [*context],
            "completion_token_ids": [*node.tokens.sampled_ids],
            **present(logprobs=[*node.tokens.logprobs] or None),
        }
    return present(
        model_name=None if node.policy is None else node.policy.served_name,
        reasoning_content=reasoning_of(node),
        tool_calls=[*map(_called, message.tool_calls)] or None,
        llm_call_count=1 if node.sampled else None,
        metrics=metrics,
        extra={_OWN: own} if own else None,
    )


def _called(call: ToolCall) -> JsonObject:
    value = arguments_object(call.arguments)
    written: JsonObject = {"tool_call_id": call.id, "function_name": call.name, "arguments": value or {}}
    exact = value is not None and to_json(value).decode() == call.arguments
    return written if exact else {**written, "extra": {"arguments": call.arguments}}
