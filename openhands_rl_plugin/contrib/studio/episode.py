"""``/api/episodes/{id}``, its nodes and tokens; ``/api/groups/{id}``: a task's samples as one tree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import Columns, columns, number, reply, whole
from openhands_rl_plugin.contrib.studio.sources import EpisodeShelf, Opened, StudioSources, TokenText
from openhands_rl_plugin.core.judgements import newest_outcome, standing
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.records import TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Score, Trajectory
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, grpo
from openhands_rl_plugin.trajectories.view.episode import Turn, view_of

EXCERPT = 160
MOST_NODES = 64
MOST_CHARACTERS = 256 * 1024
MOST_TOKENS = 4096
_LONGEST_DATA = 64 * 1024


class EpisodeResource:
    """One stored episode, finished or not."""

    def __init__(self, shelf: EpisodeShelf, text: TokenText) -> None:
        self._shelf = shelf
        self._text = text

    async def header(self, request: Request) -> Response:
        """All but the bodies of the nodes."""
        opened = await self._shelf.open(request)
        return reply(request, header_of(opened), revision=opened.revision)

    async def nodes(self, request: Request) -> Response:
        """Bodies of nodes ``from`` to before ``to``, as many as fit; ``next``: the node to go on from."""
        nodes = (await self._shelf.open(request)).trajectory.nodes
        first = whole(request, "from", 0, most=len(nodes))
        end = whole(request, "to", len(nodes), most=len(nodes))
        skip = whole(request, "skip", 0, most=2**53)
        return reply(request, bodies_of(nodes, range(first, min(end, first + MOST_NODES)), end, skip))

    async def tokens(self, request: Request) -> Response:
        """The token ids of a node from place ``from`` on: those of its prompt, then those that were sampled."""
        trajectory = (await self._shelf.open(request)).trajectory
        nodes, model = trajectory.nodes, trajectory.policy.base_model
        at = int(request.path_params["node"])
        if at >= len(nodes):
            raise HTTPException(404, f"the episode has {len(nodes)} nodes, so there is no node {at}")
        first = whole(request, "from", 0, most=2**53)
        return reply(request, await asyncio.to_thread(tokens_of, nodes[at], at, first, self._text, model))


def header_of(opened: Opened) -> JsonObject:
    """Header, scores, labels, and the skeleton: every node with the first characters of its text."""
    trajectory = opened.trajectory
    parent = sub_agent_of(trajectory.task)
    view = view_of(trajectory, opened.scores, opened.labels)
    functions = [tool.get("function") for tool in trajectory.tools]
    tools: list[JsonValue] = [each.get("name") for each in functions if isinstance(each, dict)]
    return {
        "id": view.id,
        "run": view.run_id,
        "group": view.group_id,
        "task": {
            "id": view.task.id,
            "environment": view.task.environment,
            "split": view.task.split,
            "instruction": view.task.instruction[:_LONGEST_DATA],
        },
        "sub_agent": None if parent is None else parent.model_dump(),
        "strategy": {"name": trajectory.strategy.name, "options": trajectory.strategy.options},
        "policy": trajectory.policy.model_dump(),
        "stop": view.stop.value,
        "failure": None if view.failure is None else view.failure.model_dump(mode="json"),
        "head": trajectory.head,
        "tools": tools,
        "scores": [_score(score) for score in view.scores],
        "labels": [label.model_dump(mode="json") for label in standing(view.labels)],
        "usage": view.usage.model_dump(),
        "totals": {**view.totals.model_dump(), "episode_return": number(view.totals.episode_return)},
        "started": trajectory.times.started,
        "finished": trajectory.times.finished,
        "evidence": {name: _bounded(value) for name, value in trajectory.evidence.items()},
        "nodes": dict(skeleton(trajectory, view.turns)),
    }


def skeleton(trajectory: Trajectory, turns: Sequence[Turn]) -> Columns:
    """A row a node, in the order of their making. ``policy`` only where it is another than the episode's."""
    nodes, own = trajectory.nodes, trajectory.policy
    rows: dict[str, list[JsonValue]] = {
        "parent": [each.parent for each in turns],
        "role": [each.message.role for each in turns],
        "kind": [each.kind if each.kind != "turn" else None for each in turns],
        "acted": [1 if each.acted else None for each in turns],
        "sampled": [1 if node.sampled else None for node in nodes],
        "turn": [each.turn for each in turns],
        "segment": [each.segment for each in turns],
        "cause": [each.segment_cause for each in turns],
        "reward": [number(each.reward) for each in turns],
        "value": [number(each.value) for each in turns],
        "visits": [each.visits or None for each in turns],
        "simulated": [1 if each.simulated else None for each in turns],
        "merged": [each.merged or None for each in turns],
        "dropped": [each.dropped for each in turns],
        "search": [dict(each.search_report) if each.search_report is not None else None for each in turns],
        "temperature": [each.temperature for each in turns],
        "policy": [None if node.policy in (None, own) else node.policy.served_name for node in nodes],
        "finish": [each.finish_reason for each in turns],
        "prompt_tokens": [each.prompt_tokens for each in turns],
        "sampled_tokens": [each.sampled_tokens for each in turns],
        "context_tokens": [each.context_tokens for each in turns],
        "logprob": [_mean_logprob(node) for node in nodes],
        "at": [None if node.at is None else round(node.at, 3) for node in nodes],
        "seconds": [_seconds(nodes, node) for node in nodes],
        "lacks": [list(each.lacks) or None for each in turns],
        "calls": [[call.name for call in each.message.tool_calls] or None for each in turns],
        "call": [each.message.tool_call_id for each in turns],
        "length": [len(each.message.content or "") for each in turns],
        "text": [excerpt(each) for each in turns],
    }
    return columns(rows)


def excerpt(turn: Turn) -> str:
    """The beginning of a message: its text, or else its first call."""
    text = turn.message.content or ""
    if not text.strip() and turn.message.tool_calls:
        text = turn.message.tool_calls[0].arguments
    return text[:EXCERPT]


def bodies_of(nodes: Sequence[Node], asked: range, end: int, skip: int = 0, most: int = MOST_CHARACTERS) -> JsonObject:
    """Whole messages. Of a text that is too long a part is sent; ``rest`` is the ``skip`` that shows more of it."""
    rows: dict[str, list[JsonValue]] = {
        name: [] for name in ("node", "content", "rest", "calls", "call", "name", "sampling")
    }
    left, after = most, asked.start
    for at in asked:
        node = nodes[at]
        text = (node.message.content or "")[skip if at == asked.start else 0 :]
        calls: list[JsonValue] = [call.model_dump() for call in node.message.tool_calls]
        size = len(text) + sum(len(call.arguments) for call in node.message.tool_calls)
        if left < size and after > asked.start:
            break
        shown = text[:most]
        cut = len(shown) < len(text)
        rows["node"].append(at)
        rows["content"].append(None if node.message.content is None else shown)
        rows["rest"].append((skip if at == asked.start else 0) + len(shown) if cut else None)
        rows["calls"].append([_cut_call(call) for call in calls] or None)
        rows["call"].append(node.message.tool_call_id)
        rows["name"].append(node.message.name)
        rows["sampling"].append(None if node.sampling is None else node.sampling.model_dump(exclude_none=True))
        left, after = left - size, at + 1
    return {"total": len(nodes), "next": after if after < end else None, "nodes": dict(columns(rows))}


def tokens_of(node: Node, at: int, first: int, text: TokenText, model: str, most: int = MOST_TOKENS) -> JsonObject:
    """A page of columns of the tokens of ``model``. ``sampled`` says how many of the first ``prompt`` are not the
    model's; without token ids ``total`` is 0."""
    tokens = node.tokens
    if tokens is None:
        return {"node": at, "total": 0, "prompt": 0, "extends": False, "from": 0, "next": None, "tokens": {}}
    prompt, ids = len(tokens.prompt_ids), (*tokens.prompt_ids, *tokens.sampled_ids)
    until = min(first + most, len(ids))
    logprobs = [number(tokens.logprobs[place - prompt]) if _has(node, place) else None for place in range(first, until)]
    rows: dict[str, list[JsonValue]] = {
        "id": list(ids[first:until]),
        "text": list(text.pieces(model, ids, first, until)),
        "logprob": list(logprobs),
    }
    return {
        "node": at,
        "total": len(ids),
        "prompt": prompt,
        "extends": tokens.extends,
        "from": first,
        "next": until if until < len(ids) else None,
        "tokenizer": text.problem(model),
        "tokens": dict(columns(rows)),
    }


def _has(node: Node, place: int) -> bool:
    tokens = node.tokens
    return tokens is not None and len(tokens.prompt_ids) <= place < len(tokens.prompt_ids) + len(tokens.logprobs)


def _seconds(nodes: Sequence[Node], node: Node) -> float | None:
    """What was measured, or else the time since the node above was made."""
    if node.seconds is not None:
        return number(round(node.seconds, 3))
    above = None if node.parent is None else nodes[node.parent].at
    return None if above is None or node.at is None else number(round(max(0.0, node.at - above), 3))


def _mean_logprob(node: Node) -> float | None:
    if node.tokens is None or not node.tokens.logprobs:
        return None
    mean = number(sum(node.tokens.logprobs) / len(node.tokens.logprobs))
    return None if mean is None else round(mean, 4)


def _score(score: Score) -> JsonObject:
    return {
        "reward": number(score.reward),
        "value": number(score.value),
        "version": score.reward_version,
        "detail": {name: _bounded(value) for name, value in score.detail.items()},
    }


def _cut_call(call: JsonValue) -> JsonValue:
    assert isinstance(call, dict)
    return {**call, "arguments": str(call["arguments"])[:MOST_CHARACTERS]}


def _bounded(value: JsonValue) -> JsonValue:
    """A piece of evidence, cut where it is long; its numbers are JSON's."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return value[:_LONGEST_DATA]
    if isinstance(value, list):
        return [_bounded(each) for each in value[:1000]]
    if isinstance(value, dict):
        return {name: _bounded(each) for name, each in list(value.items())[:1000]}
    return value


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
