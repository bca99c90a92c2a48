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
from typing import Annotated

from pydantic import Field, JsonValue
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
    Ending,
    Imported,
    Origin,
    date_of,
    end_of,
    finished,
    resolved,
    reward_of,
    say,
    score_of,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Finite,
    Foreign,
    LeftOutError,
    from_text,
    parse,
    tools_of,
    without_nulls,
)

NAME = "atif"
OWN = "openhands_rl"
"""The key of ``extra`` under which our own fields stand."""
_SOURCES = {"system": "system", "user": "user"}


TokenId = Annotated[int, Field(ge=0, lt=2**63)]


class AtifCall(Foreign):
    """A call. ``arguments`` is an object."""

    tool_call_id: str = ""
    function_name: str
    arguments: JsonValue = Field(default_factory=dict)
    extra: JsonObject = Field(default_factory=dict)


class AtifResult(Foreign):
    """A result, of a call or of the step."""

    source_call_id: str | None = None
    content: JsonValue = None


class AtifObservation(Foreign):
    """What the environment answered to a step."""

    results: tuple[AtifResult, ...] = ()


class AtifMetrics(Foreign):
    """Token ids of a step as far as they were recorded."""

    prompt_token_ids: tuple[TokenId, ...] | None = None
    completion_token_ids: tuple[TokenId, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None


class AtifStep(Foreign):
    """One step."""

    source: str
    timestamp: str | None = None
    message: JsonValue = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[AtifCall, ...] = ()
    observation: AtifObservation = AtifObservation()
    metrics: AtifMetrics = AtifMetrics()
    llm_call_count: int | None = None
    is_copied_context: bool = False
    extra: JsonObject = Field(default_factory=dict)


class AtifAgent(Foreign):
    """Who played."""

    name: str = UNKNOWN
    version: str = ""
    model_name: str | None = None
    tool_definitions: JsonValue = None


class AtifRecord(Foreign):
    """One trajectory."""

    schema_version: str
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent = Field(default_factory=AtifAgent)
    steps: tuple[AtifStep, ...]
    notes: str | None = None
    final_metrics: JsonValue = None
    extra: JsonObject = Field(default_factory=dict)


class OwnFields(Foreign):
    """What our own files have in the root's ``extra``."""

    task: Task | None = None
    run_id: str | None = None
    group_id: str | None = None
    policy: PolicyRef | None = None
    stop: StopReason | None = None
    score: Finite | None = None
    resolved: bool | None = None
    evidence: JsonObject = Field(default_factory=dict)


class HarborReward(Foreign):
    """The reward that counts, among those that a trial has by name."""

    reward: Finite | None = None


class HarborRewards(Foreign):
    """What the verifier of a trial wrote."""

    rewards: HarborReward = HarborReward()


class HarborTrial(Foreign):
    """``result.json`` of a trial of Harbor."""

    task_name: str | None = None
    trial_name: str | None = None
    verifier_result: HarborRewards = HarborRewards()


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
    record = parse(AtifRecord, row)
    own = parse(OwnFields, record.extra.get(OWN) or {})
    trial = _trial(file)
    policy = own.policy or PolicyRef(base_model=record.agent.model_name or UNKNOWN)
    reader = _Reader(policy, tools_of(record.agent.tool_definitions))
    for number, step in enumerate(record.steps):
        try:
            reader.take(step)
        except ExchangeError as error:
            raise ExchangeError(f"steps[{number}]: {error}") from error
    messages = reader.tree.messages()
    task = own.task or task_of(messages, UNKNOWN, trial.task_name, record.session_id, record.trajectory_id)
    origin = Origin(NAME, task, policy.base_model, own.run_id or trial.trial_name, own.group_id)
    evidence: JsonObject = dict(own.evidence)
    evidence |= {} if own.resolved is None else {"resolved": own.resolved}
    evidence |= {} if record.session_id is None else {"traj_id": record.session_id}
    evidence |= {} if record.final_metrics is None else {"metrics": record.final_metrics}
    known = (own.score, trial.verifier_result.rewards.reward, reward_of(own.resolved))
    reward = next((each for each in known if each is not None), None)
    detail: JsonObject = {} if own.resolved is None else {"resolved": own.resolved}
    ending = Ending(
        own.stop or end_of(messages), evidence, reward, detail, times=times_of(step.timestamp for step in record.steps)
    )
    return finished(reader.tree, origin, ending, policy=policy, tokens=reader.tokens or None)


class _Reader:
    def __init__(self, policy: PolicyRef, tools: tuple[JsonObject, ...]) -> None:
        self.tree = EpisodeTree(tools=tools)
        self.tokens = 0
        self._names: dict[str, str] = {}
        self._policy = policy

    def take(self, step: AtifStep) -> None:
        """Append the step's message, and what was answered to it."""
        text = text_of(step.message)
        if step.source != "agent":
            if step.source not in _SOURCES:
                raise ExchangeError(f"source: must be system, user or agent, not {step.source!r}")
            if text is not None and (text or not step.observation.results):
                say(self.tree, Message.model_validate({"role": step.source, "content": text}), None)
        else:
            self._answer(step, text)
        own = [call.tool_call_id for call in step.tool_calls]
        self._names.update({call.tool_call_id: call.function_name for call in step.tool_calls})
        results = step.observation.results
        in_order = len(own) == len(results) and all(each.source_call_id is None for each in results)
        for at, result in enumerate(results):
            called = result.source_call_id or (own[at] if in_order else own[0] if len(own) == 1 else None)
            content, name = text_of(result.content) or "", self._names.get(called or "")
            told = Message(role="user", content=content)
            if name is not None:
                told = Message(role="tool", content=content, tool_call_id=called, name=name)
            say(self.tree, told, None)

    def _answer(self, step: AtifStep, text: str | None) -> None:
        calls = tuple(
            ToolCall(id=call.tool_call_id, name=call.function_name, arguments=_arguments(call))
            for call in step.tool_calls
        )
        own = parse(OwnStep, step.extra.get(OWN) or {})
        empty = own.no_text if own.no_text is not None else text in ("", "null") and bool(calls)
        spoken = SpokenMessage(
            role="assistant", content=None if empty else text, tool_calls=calls, reasoning=step.reasoning_content
        )
        # Copied context was trained where it was first said; a step without a call of a model was not sampled.
        if step.is_copied_context or step.llm_call_count == 0 or own.sampled is False:
            say(self.tree, spoken, None)
            return
        policy = self._policy
        if step.model_name is not None and step.model_name != policy.served_name:
            policy = PolicyRef.from_served_name(policy.base_model, step.model_name)
            policy = policy if policy.adapter is not None else PolicyRef(base_model=step.model_name)
        tokens = _tokens(step.metrics)
        self.tokens += tokens is not None
        at = say(self.tree, spoken, policy, tokens=tokens, finish_reason=own.finish_reason)
        self.tree.nodes[at].reward = own.reward


class OwnStep(Foreign):
    """What our own files have in a step's ``extra``."""

    reward: Finite | None = None
    finish_reason: str | None = None
    sampled: bool | None = None
    no_text: bool | None = None


def _tokens(metrics: AtifMetrics) -> Tokens | None:
    """Raises ``ExchangeError`` when ids and logprobs do not fit."""
    if metrics.prompt_token_ids is None or metrics.completion_token_ids is None:
        return None
    given = [math.nan if each is None else each for each in metrics.logprobs or ()]
    logprobs = Tokens.known_logprobs(given, len(given))
    if logprobs and len(logprobs) != len(metrics.completion_token_ids):
        raise ExchangeError(
            f"metrics: {len(logprobs)} logprobs for {len(metrics.completion_token_ids)} completion_token_ids"
        )
    return Tokens(prompt_ids=metrics.prompt_token_ids, sampled_ids=metrics.completion_token_ids, logprobs=logprobs)


def _arguments(call: AtifCall) -> str:
    raw = call.extra.get("arguments")
    if isinstance(raw, str):
        return raw
    return call.arguments if isinstance(call.arguments, str) else to_json(without_nulls(call.arguments)).decode()


def _trial(file: Path | None) -> HarborTrial:
    """Of ``TRIAL/agent/trajectory.json``: ``TRIAL/result.json``, where it is."""
    result = file.parent.parent / "result.json" if file is not None else None
    if result is None or not result.is_file():
        return HarborTrial()
    try:
        return parse(HarborTrial, without_nulls(from_text(result.read_bytes())))
    except (OSError, ExchangeError) as error:
        raise ExchangeError(f"{result}: cannot be read: {error}") from error


VERSION = "ATIF-v1.8"


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """A document for each path that was acted on, one unless the history was rewritten.

    In a later one, what an earlier one has is marked as copied, so that nothing is trained twice. Raises
    ``LeftOutError`` for an episode in which nothing was said.
    """
    if trajectory.head is None:
        raise LeftOutError("nothing was said in it")
    seen: set[int] = set()
    for number, end in enumerate(trajectory.ends()):
        path = trajectory.path(end)
        yield _document(trajectory, scores, path, seen, number)
        seen |= {*path}


def _document(
    trajectory: Trajectory, scores: Sequence[Score], path: Sequence[int], seen: set[int], number: int
) -> JsonObject:
    own: JsonObject = {
        "task": trajectory.task.model_dump(mode="json"),
        "run_id": trajectory.run_id,
        "group_id": trajectory.group_id,
        "policy": trajectory.policy.model_dump(mode="json"),
        "stop": trajectory.stop.value,
        "evidence": trajectory.evidence,
    }
    judged: JsonObject = {"score": score_of(trajectory, scores), "resolved": resolved(trajectory, scores)}
    own |= {name: value for name, value in judged.items() if value is not None}
    agent: JsonObject = {
        "name": trajectory.strategy.name,
        "version": version("openhands_rl_plugin"),
        "model_name": trajectory.policy.served_name,
    }
    if trajectory.tools:
        agent["tool_definitions"] = [*trajectory.tools]
    extra: JsonObject = {OWN: own}
    return {
        "schema_version": VERSION,
        "session_id": trajectory.id if number == 0 else f"{trajectory.id}-{number + 1}",
        "trajectory_id": trajectory.id if number == 0 else f"{trajectory.id}-{number + 1}",
        "agent": agent,
        "steps": [*_steps(trajectory, path, seen)],
        "extra": extra,
    }


def _steps(trajectory: Trajectory, path: Sequence[int], seen: set[int]) -> Iterator[JsonObject]:
    """Results of calls are part of the step that called; the first and the last step have the episode's times."""
    steps: list[JsonObject] = []
    called: set[str] = set()
    held: tuple[int, ...] = ()
    for at in path:
        node = trajectory.nodes[at]
        message = node.message
        if node.tokens is not None:
            held = (*held, *node.tokens.prompt_ids) if node.tokens.extends else node.tokens.prompt_ids
        if message.role == "tool" and steps and message.tool_call_id in called:
            observation = steps[-1].setdefault("observation", {"results": []})
            results = observation["results"] if isinstance(observation, dict) else None
            assert isinstance(results, list)
            results.append({"source_call_id": message.tool_call_id, "content": message.content or ""})
            continue
        step: JsonObject = {"step_id": len(steps) + 1}
        if message.role == "assistant":
            step |= _agent_step(node, held)
            called = {call.id for call in message.tool_calls}
        else:
            step |= {"source": _SOURCES.get(message.role, "user"), "message": message.content or ""}
            called = set()
        steps.append(step | ({"is_copied_context": True} if at in seen else {}))
        if node.tokens is not None:
            held = (*held, *node.tokens.sampled_ids)
    for step, at in ((steps[0], trajectory.times.started), (steps[-1], trajectory.times.finished)):
        step["timestamp"] = date_of(at).isoformat()
    yield from steps


def _agent_step(node: Node, prompt_ids: Sequence[int]) -> JsonObject:
    message = node.message
    step: JsonObject = {"source": "agent", "message": message.content or ""}
    if node.policy is not None:
        step["model_name"] = node.policy.served_name
    if (reasoning := reasoning_of(node)) is not None:
        step["reasoning_content"] = reasoning
    if message.tool_calls:
        step["tool_calls"] = [_call(call) for call in message.tool_calls]
    if node.sampled:
        step["llm_call_count"] = 1
    if node.tokens is not None:
        metrics: JsonObject = {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(node.tokens.sampled_ids),
            "prompt_token_ids": [*prompt_ids],
            "completion_token_ids": [*node.tokens.sampled_ids],
        }
        if node.tokens.logprobs:
            metrics["logprobs"] = [*node.tokens.logprobs]
        step["metrics"] = metrics
    own: JsonObject = {} if node.reward is None else {"reward": node.reward}
    own |= {} if node.finish_reason is None else {"finish_reason": node.finish_reason}
    own |= {} if node.sampled else {"sampled": False}
    own |= {} if message.content else {"no_text": message.content is None}
    if own:
        step["extra"] = {OWN: own}
    return step


def _call(call: ToolCall) -> JsonObject:
    value = arguments_object(call.arguments)
    written: JsonObject = {"tool_call_id": call.id, "function_name": call.name, "arguments": value or {}}
    exact = value is not None and to_json(value).decode() == call.arguments
    return written if exact else {**written, "extra": {"arguments": call.arguments}}
