"""ATIF, the Agent Trajectory Interchange Format of Harbor, both ways, with token ids and logprobs.

Written is ATIF-v1.8, in which unknown fields are forbidden; read is every version. A step's ``metrics`` have the whole
prompt's ids, those of the answer, and a logprob for each of these. What ATIF has no field for (the task, the judgement,
rewards of steps, arguments as they were written) stands in ``extra``, so our own files are read back without loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.arrays import Ids
from openhands_rl_plugin.core.messages import reasoning_of, text_of
from openhands_rl_plugin.core.types import (
    JsonObject,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    UNKNOWN,
    ExchangeError,
    Imported,
    LeftOutError,
    Record,
    RecordMessage,
    at_path,
    chat_message,
    conversation,
    finished,
    policy_of,
    present,
    read_document,
    task_of,
    times_of,
    tools_of,
    within,
)
from openhands_rl_plugin.trajectories.exchange.rows import arguments_object, date_of, resolved, score_of

NAME = "atif"
OWN = "openhands_rl"
"""The key of ``extra`` under which our own fields stand."""

_Ids = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
_Logprobs = tuple[float | None, ...]


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By the name of its version."""
    return str(row.get("schema_version", "")).startswith("ATIF") and isinstance(row.get("steps"), list)


def is_trial(file: Path) -> bool:
    """Whether a file is the ``result.json`` of a trial of Harbor, or its settings."""
    trial = file.parent / "agent" / "trajectory.json"
    return file.name in ("result.json", "config.json") and (trial.is_file() or any(file.parent.glob("*/agent")))


def read(record: Record, file: Path | None = None) -> Imported:
    """An episode of a document; a trial of Harbor beside it gives the task's name and the reward.

    Raises ``ExchangeError`` that names the step.
    """
    trial = _trial(file)
    own, agent = record.record("extra").record(OWN), record.record("agent")
    policy = own.read(PolicyRef, "policy") or policy_of(agent.read(str, "model_name"))
    messages: list[RecordMessage] = []
    for number, step in enumerate(record.read(list, "steps") or ()):
        with within(f"steps[{number}]"):
            messages += _messages(Record(step), policy)
    if not messages:
        raise ExchangeError("steps: is empty")
    tree = conversation(messages, tools=tools_of(agent.get("tool_definitions")))
    names = (trial.text("task_name"), record.text("session_id"), record.text("trajectory_id"))
    score, solved = own.read(float, "score"), own.read(bool, "resolved")
    earned = trial.record("verifier_result").record("rewards").read(float, "reward")
    noted = present(resolved=solved, traj_id=record.read(str, "session_id"), metrics=record.get("final_metrics"))
    return finished(
        tree,
        NAME,
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


def _messages(step: Record, policy: PolicyRef) -> Iterator[RecordMessage]:
    """The step's message, and what was observed after it."""
    text, source = text_of(step.get("message")), step.text("source")
    calls, results = step.records("tool_calls"), step.record("observation").records("results")
    names = {call.text("tool_call_id"): call.text("function_name") for call in calls}
    if source == "agent":
        yield _answer(step, text, calls, policy)
    elif source not in ("system", "user"):
        raise ExchangeError(f"source: must be system, user or agent, not {source!r}")
    elif text is not None and (text or not results):
        yield RecordMessage(role=source, content=text)
    for result in results:
        called = result.read(str, "source_call_id") or (next(iter(names)) if len(names) == 1 else None)
        content = text_of(result.get("content")) or ""
        yield RecordMessage(role="tool", content=content, tool_call_id=called, name=names.get(called or ""))


def _answer(step: Record, text: str | None, calls: Sequence[Record], policy: PolicyRef) -> RecordMessage:
    own = step.record("extra").record(OWN)
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
    """Of ``TRIAL/agent/trajectory.json``: ``TRIAL/result.json``, where it is."""
    result = file.parent.parent / "result.json" if file is not None else None
    return Record(read_document(result) if result is not None and result.is_file() else {})


VERSION = "ATIF-v1.8"


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
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
            "schema_version": VERSION,
            "session_id": identity,
            "trajectory_id": identity,
            "agent": agent,
            "steps": [*_steps(trajectory, path, seen)],
            "extra": {OWN: facts},
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
        tool_calls=[*map(_call, message.tool_calls)] or None,
        llm_call_count=1 if node.sampled else None,
        metrics=metrics,
        extra={OWN: own} if own else None,
    )


def _call(call: ToolCall) -> JsonObject:
    value = arguments_object(call.arguments)
    written: JsonObject = {"tool_call_id": call.id, "function_name": call.name, "arguments": value or {}}
    exact = value is not None and to_json(value).decode() == call.arguments
    return written if exact else {**written, "extra": {"arguments": call.arguments}}
