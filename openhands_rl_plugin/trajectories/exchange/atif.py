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

from pydantic import Field, JsonValue, TypeAdapter
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_of, text_of
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    JsonObject,
    Message,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.conversations import arguments_object
from openhands_rl_plugin.trajectories.exchange.episodes import (
    UNKNOWN,
    Imported,
    date_of,
    finished,
    policy_of,
    resolved,
    say,
    score_of,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    LeftOutError,
    Record,
    present,
    read_document,
    tools_of,
    within,
    without_nulls,
)

NAME = "atif"
OWN = "openhands_rl"
"""The key of ``extra`` under which our own fields stand."""
_SOURCES = {"system": "system", "user": "user"}

_IDS = TypeAdapter(tuple[Annotated[int, Field(ge=0, lt=2**63)], ...])
_LOGPROBS = TypeAdapter(tuple[float | None, ...])
_TASK, _POLICY, _STOP = TypeAdapter(Task), TypeAdapter(PolicyRef), TypeAdapter(StopReason)


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By the name of its version."""
    return str(row.get("schema_version", "")).startswith("ATIF") and isinstance(row.get("steps"), list)


def is_trial(file: Path) -> bool:
    """Whether a file is the ``result.json`` of a trial of Harbor, or its settings."""
    trial = file.parent / "agent" / "trajectory.json"
    return file.name in ("result.json", "config.json") and (trial.is_file() or any(file.parent.glob("*/agent")))


def read(row: JsonObject, file: Path | None = None) -> Imported:
    """An episode of a document; a trial of Harbor beside it gives the task's name and the reward.

    Raises ``ExchangeError`` that names the step.
    """
    record, trial = Record(row), _trial(file)
    own, agent = record.record("extra").record(OWN), record.record("agent")
    policy = own.read(_POLICY, "policy") or policy_of(agent.read(str, "model_name"))
    reader = _Reader(policy, tools_of(agent.get("tool_definitions")))
    if not (steps := record.read(list, "steps")):
        raise ExchangeError("steps: is empty")
    for number, step in enumerate(steps):
        with within(f"steps[{number}]"):
            reader.take(Record(step))
    names = (trial.text("task_name"), record.text("session_id"), record.text("trajectory_id"))
    task = own.read(_TASK, "task") or task_of(reader.tree.messages(), UNKNOWN, *names)
    score, solved = own.read(float, "score"), own.read(bool, "resolved")
    earned = trial.record("verifier_result").record("rewards").read(float, "reward")
    noted = present(resolved=solved, traj_id=record.read(str, "session_id"), metrics=record.get("final_metrics"))
    return finished(
        reader.tree,
        NAME,
        task,
        own.read(_STOP, "stop"),
        policy=policy,
        run_id=own.text("run_id") or trial.text("trial_name"),
        group_id=own.read(str, "group_id"),
        evidence={**(own.read(dict, "evidence") or {}), **noted},
        reward=earned if score is None else score,
        resolved=solved,
        times=times_of(reader.stamps),
        tokens=reader.tokens or None,
    )


class _Reader:
    def __init__(self, policy: PolicyRef, tools: tuple[JsonObject, ...]) -> None:
        self.tree = EpisodeTree(tools=tools)
        self.tokens = 0
        self.stamps: list[JsonValue] = []
        self._names: dict[str, str] = {}
        self._policy = policy

    def take(self, step: Record) -> None:
        """Append the step's message, and what was observed after it."""
        text, source = text_of(step.get("message")), step.text("source")
        calls, results = step.records("tool_calls"), step.record("observation").records("results")
        self.stamps.append(step.get("timestamp"))
        if source == "agent":
            self._answer(step, text, calls)
        elif source not in _SOURCES:
            raise ExchangeError(f"source: must be system, user or agent, not {source!r}")
        elif text is not None and (text or not results):
            say(self.tree, Message.model_validate({"role": source, "content": text}), None)
        own = [call.text("tool_call_id") for call in calls]
        self._names.update({call.text("tool_call_id"): call.text("function_name") for call in calls})
        in_order = len(own) == len(results) and not any(each.text("source_call_id") for each in results)
        for at, result in enumerate(results):
            called = result.text("source_call_id") or (own[at] if in_order else own[0] if len(own) == 1 else None)
            content, name = text_of(result.get("content")) or "", self._names.get(called or "")
            observed = Message(role="user", content=content)
            if name is not None:
                observed = Message(role="tool", content=content, tool_call_id=called, name=name)
            say(self.tree, observed, None)

    def _answer(self, step: Record, text: str | None, given: Sequence[Record]) -> None:
        calls = tuple(
            ToolCall(id=call.text("tool_call_id"), name=call.text("function_name"), arguments=_arguments(call))
            for call in given
        )
        own = step.record("extra").record(OWN)
        empty = own.read(bool, "no_text")
        empty = empty if empty is not None else text in ("", "null") and bool(calls)
        reasoning = step.read(str, "reasoning_content")
        content = None if empty else text
        spoken = SpokenMessage(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)
        # Copied context was trained where it first stands; a step without a call of a model was not sampled.
        if step.read(bool, "is_copied_context") or step.get("llm_call_count") == 0 or own.get("sampled") is False:
            say(self.tree, spoken, None)
            return
        policy, served = self._policy, step.read(str, "model_name")
        if served is not None and served != policy.served_name:
            policy = PolicyRef.from_served_name(policy.base_model, served)
            policy = policy if policy.adapter is not None else PolicyRef(base_model=served)
        tokens = _tokens(step.record("metrics"))
        self.tokens += tokens is not None
        at = say(self.tree, spoken, policy, tokens=tokens, finish_reason=own.read(str, "finish_reason"))
        self.tree.nodes[at].reward = own.read(float, "reward")


def _tokens(metrics: Record) -> Tokens | None:
    """Raises ``ExchangeError`` when ids and logprobs do not fit."""
    prompt, sampled = metrics.read(_IDS, "prompt_token_ids"), metrics.read(_IDS, "completion_token_ids")
    if prompt is None or sampled is None:
        return None
    given = [math.nan if each is None else each for each in metrics.read(_LOGPROBS, "logprobs") or ()]
    logprobs = Tokens.known_logprobs(given, len(given))
    if logprobs and len(logprobs) != len(sampled):
        raise ExchangeError(f"metrics: {len(logprobs)} logprobs for {len(sampled)} completion_token_ids")
    return Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs)


def _arguments(call: Record) -> str:
    exact = call.record("extra").get("arguments")
    arguments = exact if isinstance(exact, str) else call.get("arguments")
    return arguments if isinstance(arguments, str) else to_json(without_nulls(arguments or {})).decode()


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
    seen: set[int] = set()
    for number, end in enumerate(trajectory.ends()):
        path = trajectory.path(end)
        yield _document(trajectory, scores, path, seen, number)
        seen |= {*path}


def _document(
    trajectory: Trajectory, scores: Sequence[Score], path: Sequence[int], seen: set[int], number: int
) -> JsonObject:
    identity = trajectory.id if number == 0 else f"{trajectory.id}-{number + 1}"
    own: JsonObject = {
        "task": trajectory.task.model_dump(mode="json"),
        "run_id": trajectory.run_id,
        "group_id": trajectory.group_id,
        "policy": trajectory.policy.model_dump(mode="json"),
        "stop": trajectory.stop.value,
        "evidence": trajectory.evidence,
        **present(score=score_of(trajectory, scores), resolved=resolved(trajectory, scores)),
    }
    agent: JsonObject = {
        "name": trajectory.strategy.name,
        "version": version("openhands_rl_plugin"),
        "model_name": trajectory.policy.served_name,
        **present(tool_definitions=[*trajectory.tools] or None),
    }
    return {
        "schema_version": VERSION,
        "session_id": identity,
        "trajectory_id": identity,
        "agent": agent,
        "steps": [*_steps(trajectory, path, seen)],
        "extra": {OWN: own},
    }


def _steps(trajectory: Trajectory, path: Sequence[int], seen: set[int]) -> list[dict[str, Any]]:
    """Results of calls are part of the step that called; the first and the last step have the episode's times."""
    steps: list[dict[str, Any]] = []
    called: set[str] = set()
    context: tuple[int, ...] = ()
    for at in path:
        node, message = trajectory.nodes[at], trajectory.nodes[at].message
        if node.tokens is not None:
            context = (*context, *node.tokens.prompt_ids) if node.tokens.extends else node.tokens.prompt_ids
        if message.role == "tool" and steps and message.tool_call_id in called:
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": message.tool_call_id, "content": message.content or ""})
            continue
        called = {call.id for call in message.tool_calls}
        source = "agent" if message.role == "assistant" else _SOURCES.get(message.role, "user")
        step = {"step_id": len(steps) + 1, "source": source, "message": message.content or ""}
        step |= _agent_fields(node, context) if source == "agent" else {}
        steps.append(step | ({"is_copied_context": True} if at in seen else {}))
        if node.tokens is not None:
            context = (*context, *node.tokens.sampled_ids)
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
