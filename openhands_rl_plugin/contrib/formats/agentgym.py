"""Records of the original module (AgentGym's conversations) and rows of AgentTraj.

``human`` is what the environment says and ``gpt`` what the policy says; ``loss`` is true on what is trained, false on
what the assistant says without being sampled (an opening "Ok."), and null on the rest.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import JsonObject, Message, PolicyRef, Score, StopReason, Task, Times, Trajectory
from openhands_rl_plugin.trajectories.exchange.episodes import (
    UNKNOWN,
    UNKNOWN_TIMES,
    Ending,
    Imported,
    Origin,
    date_of,
    end_of,
    finished,
    say,
    score_of,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Finite, Foreign, LeftOutError, parse
from openhands_rl_plugin.trajectories.exchange.formats import Format

_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
_FROM = {"system": "system", "user": "human", "tool": "human", "assistant": "gpt"}
_SPEAKERS = {"system": "System", "human": "Human", "gpt": "Assistant"}


class Said(Foreign):
    """One message."""

    speaker: Literal["system", "human", "user", "gpt", "assistant"] = Field(alias="from")
    value: str = ""
    loss: bool | None = None


class Played(Foreign):
    """What a record holds of the episode. ``reward`` is the last step's in old records, the return in ours."""

    conversation: tuple[Said, ...]
    reward: Finite | None = None


class AgentGymRecord(Foreign):
    """A record of the original storage; ``timestamp`` is ISO 8601, or Unix time in seconds."""

    id: str | None = None
    env_name: str = ""
    task_id: str | None = None
    timestamp: str | None = None
    metadata: JsonObject = Field(default_factory=dict)
    trajectory: Played


class TrajRow(Foreign):
    """A row of AgentTraj; an evaluation row without a conversation is no episode."""

    item_id: str
    conversations: tuple[Said, ...]


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One record. Raises ``LeftOutError`` for native tool calls, which the format does not have."""
    indices = transcript_nodes(trajectory)
    if not indices:
        raise LeftOutError("nothing was said in it")
    if any(trajectory.nodes[index].message.tool_calls for index in indices):
        raise LeftOutError("it has native tool calls, which AgentGym records do not have")
    conversation: list[JsonValue] = []
    for index in indices:
        node = trajectory.nodes[index]
        loss = node.sampled if node.message.role == "assistant" else None
        conversation.append({"from": _FROM[node.message.role], "value": node.message.content or "", "loss": loss})
    yield {
        "id": trajectory.id,
        "env_name": trajectory.task.environment,
        "task_id": trajectory.task.id,
        "timestamp": date_of(trajectory.times.finished).isoformat(),
        "metadata": _metadata(trajectory),
        "trajectory": {
            "reward": score_of(trajectory, scores),
            "conversation": conversation,
            "text": "".join(_spoken(each) for each in conversation if isinstance(each, dict)),
        },
    }


def read(row: JsonObject) -> Imported:
    """An episode of a record, or of an AgentTraj row. Raises ``ExchangeError``."""
    if "conversations" in row or "item_id" in row:
        return _read_traj_row(parse(TrajRow, row))
    record = parse(AgentGymRecord, row)
    description = record.metadata.get("task_description")
    instruction = description if isinstance(description, str) else ""
    named = {key: value for key in ("model", "run_id") if isinstance(value := record.metadata.get(key), str)}
    tree = _tree(record.trajectory.conversation, PolicyRef(base_model=named.get("model") or UNKNOWN))
    task = task_of(tree.messages(), record.env_name, record.task_id)
    task = task.model_copy(update={"instruction": instruction})
    origin = Origin("agentgym", task, named.get("model"), named.get("run_id"), identity=_identity(record.id))
    _reward_last(tree, record.trajectory.reward)
    return finished(tree, origin, Ending(_stop(record, tree), {**record.metadata}, times=_times(record.timestamp)))


def _identity(own: str | None) -> str | None:
    """A record's own id, where it is one that no other record has; numbers start again in every file."""
    try:
        return own and str(uuid.UUID(own))
    except ValueError:
        return None


def _metadata(trajectory: Trajectory) -> JsonObject:
    known: JsonObject = {
        "task_description": trajectory.task.instruction,
        "strategy": trajectory.strategy.name,
        "model": trajectory.policy.served_name,
        "run_id": trajectory.run_id,
        "stop": trajectory.stop.value,
    }
    return known if trajectory.failure is None else {**known, "failure": trajectory.failure.message}


def _spoken(said: JsonObject) -> str:
    return f"\n{_SPEAKERS[str(said['from'])]}: {said['value']}"


def _read_traj_row(row: TrajRow) -> Imported:
    environment = row.item_id.partition("_")[0]
    origin = Origin("agentgym", Task(id=row.item_id, environment=environment))
    tree = _tree(row.conversations, origin.policy)
    return finished(tree, origin, Ending(end_of(tree.messages()), {}))


def _tree(conversation: Sequence[Said], policy: PolicyRef) -> EpisodeTree:
    tree = EpisodeTree()
    for said in conversation:
        role = _ROLES[said.speaker]
        sampled = role == "assistant" and said.loss is not False
        say(tree, Message(role=role, content=said.value), policy if sampled else None)
    return tree


def _reward_last(tree: EpisodeTree, reward: float | None) -> None:
    """The only reward that a record has belongs to the last action."""
    sampled = [node for node in tree.nodes if node.sampled]
    if sampled and reward is not None:
        sampled[-1].reward = reward


def _stop(record: AgentGymRecord, tree: EpisodeTree) -> StopReason:
    stop = record.metadata.get("stop")
    return StopReason(stop) if isinstance(stop, str) and stop in set(StopReason) else end_of(tree.messages())


def _times(timestamp: str | None) -> Times:
    if timestamp is None:
        return UNKNOWN_TIMES
    try:
        at = float(timestamp)
    except ValueError:
        at = times_of([timestamp]).finished or math.nan
    try:
        date_of(at)
    except LeftOutError as error:
        raise ExchangeError(f"timestamp: must be ISO 8601 or Unix seconds, not {timestamp!r:.40}") from error
    return Times(started=at, finished=at)


FORMAT = Format(
    "agentgym",
    "AgentGym records, and AgentTraj rows in",
    lambda row, file: read(row),
    lambda trajectory, scores, beaten: (("", row) for row in rows(trajectory, scores)),
    TrajectoryFilter(),
    recognises=lambda row: "conversations" in row and "item_id" in row,
)
