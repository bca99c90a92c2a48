"""``/api/groups/{id}``: all samples of a task as one tree of turns that branches at the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import columns, number, reply
from openhands_rl_plugin.contrib.studio.resources.episode import EXCERPT
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.transcript import transcript_nodes
from openhands_rl_plugin.core.types import JsonObject, Message, Score, Trajectory
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, grpo

MOST_SAMPLES = 64


@dataclass
class _Turn:
    """A message that some of the samples have in common, up to here."""

    parent: int | None
    message: Message
    sampled: bool
    samples: list[JsonValue] = field(default_factory=list)
    nodes: list[JsonValue] = field(default_factory=list)


class GroupResource:
    """The samples of one task."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources

    async def get(self, request: Request) -> Response:
        """``samples`` (a table) and ``turns`` (the tree). Raises ``HTTPException`` 404."""
        name, storage = request.path_params["id"], self._sources.store(request)
        where = TrajectoryFilter(group_id=name, finished=None)
        found = [each async for each in storage.find(where.model_copy(update={"limit": MOST_SAMPLES}))]
        if not found:
            raise HTTPException(404, f"no episode is of the group {name[:80]!r}")
        return reply(request, group_of(name, found, await storage.count(where)))


def group_of(name: str, found: Sequence[tuple[Trajectory, tuple[Score, ...]]], total: int) -> JsonObject:
    """The reply. ``advantage`` is GRPO's, of the rewards that are known now."""
    trajectories = [trajectory for trajectory, _ in found]
    rewards = [_reward(trajectory, scores) for trajectory, scores in found]
    valid = [reward for reward in rewards if reward is not None]
    advantages = iter(grpo(RolloutBatch(valid, [0] * len(valid), [1] * len(valid))))
    samples: dict[str, list[JsonValue]] = {
        "id": [each.id for each in trajectories],
        "adapter": [each.policy.adapter for each in trajectories],
        "version": [each.policy.version for each in trajectories],
        "stop": [each.stop.value for each in trajectories],
        "failed": [None if each.failure is None else each.failure.kind.value for each in trajectories],
        "reward": [number(reward) for reward in rewards],
        "advantage": [None if reward is None else number(next(advantages)) for reward in rewards],
        "turns": [len(each.acted()) for each in trajectories],
    }
    task = trajectories[0].task
    return {
        "id": name,
        "task": {"id": task.id, "environment": task.environment, "split": task.split},
        "total": total,
        "signal": len(set(valid)) > 1,
        "samples": dict(columns(samples)),
        "turns": _table(_trie(trajectories)),
    }


def _reward(trajectory: Trajectory, scores: Sequence[Score]) -> float | None:
    if trajectory.failure is not None:
        return None
    outcome = newest_outcome(scores)
    return number(trajectory.known_return if outcome is None else outcome.reward)


def _trie(trajectories: Sequence[Trajectory]) -> list[_Turn]:
    turns: list[_Turn] = []
    below: dict[tuple[int | None, str], int] = {}
    for sample, trajectory in enumerate(trajectories):
        parent: int | None = None
        for at in transcript_nodes(trajectory):
            node = trajectory.nodes[at]
            # Ids of calls are drawn at random, and say nothing.
            said = node.message.model_copy(
                update={
                    "tool_call_id": None,
                    "tool_calls": tuple(call.model_copy(update={"id": ""}) for call in node.message.tool_calls),
                }
            )
            key = (parent, said.model_dump_json())
            if key not in below:
                below[key] = len(turns)
                turns.append(_Turn(parent, node.message, node.sampled))
            parent = below[key]
            turns[parent].samples.append(sample)
            turns[parent].nodes.append(at)
    return turns


def _table(turns: Sequence[_Turn]) -> JsonObject:
    rows: dict[str, list[JsonValue]] = {
        "parent": [each.parent for each in turns],
        "role": [each.message.role for each in turns],
        "sampled": [1 if each.sampled else None for each in turns],
        "samples": [each.samples for each in turns],
        "nodes": [each.nodes for each in turns],
        "calls": [[call.name for call in each.message.tool_calls] or None for each in turns],
        "text": [_excerpt(each.message) for each in turns],
    }
    return dict(columns(rows))


def _excerpt(message: Message) -> str:
    text = message.content or ""
    if not text.strip() and message.tool_calls:
        text = message.tool_calls[0].arguments
    return text[:EXCERPT]
