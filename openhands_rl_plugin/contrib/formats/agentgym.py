"""Records of the original module (AgentGym's conversations) and rows of AgentTraj.

``human`` is what the environment says and ``gpt`` what the policy says; ``loss`` is true on what is trained, false on
what the assistant says without being sampled (an opening "Ok."), and null on the rest.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.judgements import score_of
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import JsonObject, Message, Score, StopReason, Task, Times, Trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import (
    UNKNOWN_TIMES,
    ExchangeError,
    Imported,
    LeftOutError,
    Record,
    chat_message,
    conversation,
    date_of,
    finished,
    present,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format

_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_FROM = {"system": "system", "user": "human", "tool": "human", "assistant": "gpt"}
_SPEAKERS = {"system": "System", "human": "Human", "gpt": "Assistant"}


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One record. Raises ``LeftOutError`` for native tool calls, which the format does not have."""
    nodes = [trajectory.nodes[index] for index in transcript_nodes(trajectory)]
    if not nodes:
        raise LeftOutError("there is no message in it")
    if any(node.message.tool_calls for node in nodes):
        raise LeftOutError("it has native tool calls, which AgentGym records do not have")
    listed: list[JsonValue] = []
    text = ""
    for node in nodes:
        speaker, content = _FROM[node.message.role], node.message.content or ""
        listed.append({"from": speaker, "value": content, "loss": node.sampled if speaker == "gpt" else None})
        text += f"\n{_SPEAKERS[speaker]}: {content}"
    metadata: JsonObject = {
        "task_description": trajectory.task.instruction,
        "strategy": trajectory.strategy.name,
        "model": trajectory.policy.served_name,
        "run_id": trajectory.run_id,
        "stop": trajectory.stop.value,
        **present(failure=None if trajectory.failure is None else trajectory.failure.message),
    }
    yield {
        "id": trajectory.id,
        "env_name": trajectory.task.environment,
        "task_id": trajectory.task.id,
        "timestamp": date_of(trajectory.times.finished).isoformat(),
        "metadata": metadata,
        "trajectory": {"reward": score_of(trajectory, scores), "conversation": listed, "text": text},
    }


def read(record: Record) -> Imported:
    """An episode of a record, or of an AgentTraj row. Raises ``ExchangeError``."""
    if "conversations" in record.fields or "item_id" in record.fields:
        item = record.text("item_id")
        tree = _tree(record, "conversations", None)
        return finished(tree, "agentgym", Task(id=item, environment=item.partition("_")[0]))
    held, metadata = record.record("trajectory"), record.read(dict, "metadata") or {}
    named = {key: value for key in ("model", "run_id") if isinstance(value := metadata.get(key), str)}
    tree = _tree(held, "conversation", named.get("model"))
    described, stop = metadata.get("task_description"), metadata.get("stop")
    task = task_of(tree.messages(), record.text("env_name"), record.read(str, "task_id"))
    task = task.model_copy(update={"instruction": described if isinstance(described, str) else ""})
    # The only reward that a record has, the last step's in old ones, the return in ours, belongs to the last action.
    sampled = [node for node in tree.nodes if node.sampled]
    if sampled:
        sampled[-1].reward = held.read(float, "reward")
    return finished(
        tree,
        "agentgym",
        task,
        StopReason(stop) if isinstance(stop, str) and stop in set(StopReason) else None,
        identity=_identity(record.text("id")),
        evidence=metadata,
        times=_times(record.read(str, "timestamp")),
        model=named.get("model"),
        run_id=named.get("run_id"),
    )


def _identity(own: str) -> str | None:
    """A record's own id, where it is one that no other record has; numbers start again in every file."""
    try:
        return str(uuid.UUID(own))
    except ValueError:
        return None


def _tree(record: Record, name: str, model: str | None) -> EpisodeTree:
    if name not in record.fields:
        raise ExchangeError(f"{name}: is required")
    messages: list[Message] = []
    for each in record.records(name):
        if (role := _ROLES.get(speaker := each.text("from"))) is None:
            raise ExchangeError(f"{name}.from: must be {', '.join(map(repr, _ROLES))}, not {speaker!r}")
        messages.append(chat_message({"role": role, "content": each.get("value"), "loss": each.get("loss")}))
    return conversation(messages, model)


def _times(timestamp: str | None) -> Times:
    """Parse a time in ISO 8601, or a Unix time in seconds."""
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
    lambda record, file: read(record),
    rows,
    TrajectoryFilter(),
    has=("conversations item_id", "trajectory.conversation"),
)
