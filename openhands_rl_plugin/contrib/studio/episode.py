"""``/api/episodes/{id}``, its nodes and tokens; ``/api/groups/{id}``: a task's samples as one tree."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import columns, number, plain, reply, whole
from openhands_rl_plugin.contrib.studio.sources import EpisodeShelf, Opened, StudioSources, TokenText
from openhands_rl_plugin.core.judgements import newest_outcome, standing
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.records import TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Score, Trajectory
from openhands_rl_plugin.training.algorithms import RolloutBatch, grpo
from openhands_rl_plugin.trajectories.view import Turn, totals_of, turns_of

EXCERPT = 160
MOST_NODES = 64
MOST_CHARACTERS = 256 * 1024
MOST_TOKENS = 4096
MOST_SAMPLES = 64
_LONGEST_DATA, _MOST_DATA = 64 * 1024, 1000


class EpisodeResource:
    """Stored episodes, finished or not, and the samples of one task."""

    def __init__(self, sources: StudioSources, shelf: EpisodeShelf, text: TokenText) -> None:
        self._sources = sources
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

    async def group(self, request: Request) -> Response:
        """``samples`` (a table) and ``turns`` (the tree). Raises ``HTTPException`` 404."""
        name, storage = request.path_params["id"], self._sources.store(request)
        where = TrajectoryFilter(group_id=name, finished=None)
        found = [each async for each in storage.find(where.model_copy(update={"limit": MOST_SAMPLES}))]
        if not found:
            raise HTTPException(404, f"no episode is of the group {name[:80]!r}")
        return reply(request, group_of(name, found, await storage.count(where)))


def header_of(opened: Opened) -> JsonObject:
    """Header, scores, labels, and the skeleton: every node with the first characters of its text."""
    trajectory = opened.trajectory
    parent = sub_agent_of(trajectory.task)
    turns = turns_of(trajectory)
    totals = totals_of(trajectory, turns)
    functions = [tool.get("function") for tool in trajectory.tools]
    tools: list[JsonValue] = [each.get("name") for each in functions if isinstance(each, dict)]
    return {
        "id": trajectory.id,
        "run": trajectory.run_id,
        "group": trajectory.group_id,
        "task": {**_task(trajectory), "instruction": trajectory.task.instruction[:_LONGEST_DATA]},
        "sub_agent": None if parent is None else parent.model_dump(),
        "strategy": {"name": trajectory.strategy.name, "options": trajectory.strategy.options},
        "policy": trajectory.policy.model_dump(),
        "stop": trajectory.stop.value,
        "failure": None if trajectory.failure is None else trajectory.failure.model_dump(mode="json"),
        "head": trajectory.head,
        "tools": tools,
        "scores": [_score(score) for score in opened.scores],
        "labels": [label.model_dump(mode="json") for label in standing(opened.labels)],
        "usage": trajectory.usage.model_dump(),
        "totals": {**totals, "episode_return": number(totals["episode_return"])},
        "started": trajectory.times.started,
        "finished": trajectory.times.finished,
        "evidence": plain(trajectory.evidence, _LONGEST_DATA, _MOST_DATA),
        "nodes": skeleton(trajectory, turns),
    }


def _task(trajectory: Trajectory) -> JsonObject:
    return trajectory.task.model_dump(include={"id", "environment", "split"})


def skeleton(trajectory: Trajectory, turns: Sequence[Turn]) -> JsonObject:
    """A row a node, in the order of their making. ``policy`` only where it is another than the episode's."""
    nodes, own = trajectory.nodes, trajectory.policy
    same = ("parent", "turn", "segment", "temperature", "prompt_tokens", "sampled_tokens", "context_tokens")
    return columns(
        {
            **{name: [getattr(each, name) for each in turns] for name in same},
            **{name: [number(getattr(each, name)) for each in turns] for name in ("reward", "value")},
            **{name: [getattr(each, name) or None for each in turns] for name in ("visits", "lacks")},
            **{name: [1 if getattr(each, name) else None for each in turns] for name in ("acted", "simulated")},
            "role": [each.message.role for each in turns],
            "kind": [each.kind if each.kind != "turn" else None for each in turns],
            "sampled": [1 if node.sampled else None for node in nodes],
            "cause": [each.segment_cause for each in turns],
            "search": [each.search.get("report") for each in turns],
            **{name: [each.search.get(name) for each in turns] for name in ("merged", "dropped")},
            "policy": [node.policy.served_name if node.policy and node.policy != own else None for node in nodes],
            "finish": [each.finish_reason for each in turns],
            "logprob": [_mean_logprob(node) for node in nodes],
            "at": [None if node.at is None else round(node.at, 3) for node in nodes],
            "seconds": [_seconds(nodes, node) for node in nodes],
            "calls": [[call.name for call in each.message.tool_calls] or None for each in turns],
            "call": [each.message.tool_call_id for each in turns],
            "length": [len(each.message.content or "") for each in turns],
            "text": [_excerpt(each.message) for each in turns],
        }
    )


def bodies_of(nodes: Sequence[Node], asked: range, end: int, skip: int = 0, most: int = MOST_CHARACTERS) -> JsonObject:
    """Whole messages. Of a text that is too long a part is sent; ``rest`` is the ``skip`` that shows more of it."""
    rows: dict[str, list[JsonValue]] = defaultdict(list)
    left, after = most, asked.start
    for at in asked:
        node = nodes[at]
        text = (node.message.content or "")[skip if at == asked.start else 0 :]
        calls: list[JsonValue] = [
            {**call.model_dump(), "arguments": call.arguments[:MOST_CHARACTERS]} for call in node.message.tool_calls
        ]
        size = len(text) + sum(len(call.arguments) for call in node.message.tool_calls)
        if left < size and after > asked.start:
            break
        shown = text[:most]
        rows["node"].append(at)
        rows["content"].append(None if node.message.content is None else shown)
        rows["rest"].append((skip if at == asked.start else 0) + len(shown) if len(shown) < len(text) else None)
        rows["calls"].append(calls or None)
        rows["call"].append(node.message.tool_call_id)
        rows["name"].append(node.message.name)
        rows["sampling"].append(None if node.sampling is None else node.sampling.model_dump(exclude_none=True))
        left, after = left - size, at + 1
    return {"total": len(nodes), "next": after if after < end else None, "nodes": columns(rows)}


def tokens_of(node: Node, at: int, first: int, text: TokenText, model: str, most: int = MOST_TOKENS) -> JsonObject:
    """A page of columns of the tokens of ``model``. ``sampled`` says how many of the first ``prompt`` are not the
    model's; without token ids ``total`` is 0."""
    tokens = node.tokens
    if tokens is None:
        return {"node": at, "total": 0, "prompt": 0, "extends": False, "from": 0, "next": None, "tokens": {}}
    prompt, ids = len(tokens.prompt_ids), (*tokens.prompt_ids, *tokens.sampled_ids)
    until = min(first + most, len(ids))
    known = range(prompt, prompt + len(tokens.logprobs))
    shown = range(first, until)
    rows = {
        "id": ids[first:until],
        "text": text.pieces(model, ids, first, until),
        "logprob": [number(tokens.logprobs[place - prompt]) if place in known else None for place in shown],
    }
    return {
        "node": at,
        "total": len(ids),
        "prompt": prompt,
        "extends": tokens.extends,
        "from": first,
        "next": until if until < len(ids) else None,
        "tokenizer": text.problem(model),
        "tokens": columns(rows),
    }


def _seconds(nodes: Sequence[Node], node: Node) -> float | None:
    """The measured seconds of a node, or else the time since its parent was made."""
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
        "detail": plain(score.detail, _LONGEST_DATA, _MOST_DATA),
    }


@dataclass
class _Turn:
    """A message that some of the samples have in common, up to here."""

    parent: int | None
    message: Message
    sampled: bool
    samples: list[JsonValue] = field(default_factory=list)
    nodes: list[JsonValue] = field(default_factory=list)


def group_of(name: str, found: Sequence[tuple[Trajectory, tuple[Score, ...]]], total: int) -> JsonObject:
    """The reply. ``advantage`` is GRPO's, of the rewards that are known now."""
    trajectories = [trajectory for trajectory, _ in found]
    rewards = [_reward(trajectory, scores) for trajectory, scores in found]
    valid = [reward for reward in rewards if reward is not None]
    advantages = iter(grpo(RolloutBatch(valid, [0] * len(valid), [1] * len(valid))))
    samples = {
        "id": [each.id for each in trajectories],
        "adapter": [each.policy.adapter for each in trajectories],
        "version": [each.policy.version for each in trajectories],
        "stop": [each.stop.value for each in trajectories],
        "failed": [None if each.failure is None else each.failure.kind.value for each in trajectories],
        "reward": [number(reward) for reward in rewards],
        "advantage": [None if reward is None else number(next(advantages)) for reward in rewards],
        "turns": [len(each.acted()) for each in trajectories],
    }
    tree = _trie(trajectories)
    turns = {
        **{name: [getattr(each, name) for each in tree] for name in ("parent", "samples", "nodes")},
        "role": [each.message.role for each in tree],
        "sampled": [1 if each.sampled else None for each in tree],
        "calls": [[call.name for call in each.message.tool_calls] or None for each in tree],
        "text": [_excerpt(each.message) for each in tree],
    }
    return {
        "id": name,
        "task": _task(trajectories[0]),
        "total": total,
        "signal": len(set(valid)) > 1,
        "samples": columns(samples),
        "turns": columns(turns),
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
            message = node.message.model_copy(
                update={
                    "tool_call_id": None,
                    "tool_calls": tuple(call.model_copy(update={"id": ""}) for call in node.message.tool_calls),
                }
            )
            key = (parent, message.model_dump_json())
            if key not in below:
                below[key] = len(turns)
                turns.append(_Turn(parent, node.message, node.sampled))
            parent = below[key]
            turns[parent].samples.append(sample)
            turns[parent].nodes.append(at)
    return turns


def _excerpt(message: Message) -> str:
    """The beginning of a message: its text, or else its first call."""
    text = message.content or ""
    if not text.strip() and message.tool_calls:
        text = message.tool_calls[0].arguments
    return text[:EXCERPT]
