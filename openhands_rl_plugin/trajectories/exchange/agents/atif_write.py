"""Episodes as ATIF-v1.8; ``atif`` says what stands where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version

from pydantic_core import to_json

from openhands_rl_plugin.core.reasoning import reasoning_of
from openhands_rl_plugin.core.types import JsonObject, Node, Score, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.agents.atif import OWN
from openhands_rl_plugin.trajectories.exchange.conversations import arguments_object
from openhands_rl_plugin.trajectories.exchange.dates import date_of
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.judgement import resolved, score_of

VERSION = "ATIF-v1.8"
_SOURCES = {"system": "system", "user": "user"}


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
