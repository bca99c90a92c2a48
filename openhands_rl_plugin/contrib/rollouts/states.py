"""The states of an episode and of a task, in Polar's words, and an episode's result."""

from __future__ import annotations

import json
import zlib
from enum import StrEnum

from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.trajectories.exchange.trainers.polar import BUILDER, ERROR, trajectory_of
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

_NOTHING: JsonObject = {}


class RolloutState(StrEnum):
    """Where an episode stands. ``CANCELLED``: of a deleted task; it has no result."""

    REGISTERED = "REGISTERED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    RUNNING = "RUNNING"
    POST_RUN = "POST_RUN"
    EVALUATING = "EVALUATING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"


class TaskStatus(StrEnum):
    """A task is ``completed`` when each of its episodes has a result, whatever they are."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class ClaimedSession(Frozen):
    """An episode that a worker has claimed. ``request`` is the task's, as JSON."""

    session_id: str
    task_id: str
    run: str
    sample: int
    attempt: int
    request: str


class Timing(Frozen):
    """Milliseconds of the stages, by the names of Polar's ``SessionTiming``."""

    register_to_init_queue_ms: float = 0.0
    init_ms: float = 0.0
    ready_queue_ms: float = 0.0
    run_ms: float = 0.0
    postrun_queue_ms: float = 0.0
    postrun_ms: float = 0.0
    eval_ms: float = 0.0
    e2e_ms: float = 0.0


class Result(Frozen):
    """A ``SessionResult`` as it is stored: ``body`` is JSON. ``usable``: something of it can be trained on."""

    state: RolloutState
    body: str
    usable: bool = False
    seconds: float | None = None
    tokens: int | None = None


def played_result(
    session: ClaimedSession, played: PlayedRollout, told: JsonObject, timing: Timing, node: str
) -> Result:
    """What a worker played. ``told``: the metadata of the task."""
    trajectory = trajectory_of(played, told)
    failure = played.failure
    own: JsonObject = {
        "trajectory_id": played.trajectory_id,
        "reward_version": played.reward_version,
        "resolved": played.resolved,
        "stop": played.stop.value,
        "turns": played.turns,
        "usage": played.usage.model_dump(mode="json"),
        "failure": None if failure is None else failure.model_dump(mode="json"),
    }
    usable = any(any(trace["loss_mask"]) for trace in trajectory["traces"])  # type: ignore[index,union-attr]
    body = _body(session.session_id, session.task_id, trajectory, {**told, "openhands_rl": own}, timing, node)
    seconds, tokens = played.seconds, played.usage.completion_tokens
    return Result(
        state=RolloutState(str(trajectory["status"])), body=body, usable=usable, seconds=seconds, tokens=tokens
    )


def failed_result(
    session_id: str,
    task_id: str,
    why: str,
    told: JsonObject,
    *,
    kind: str,
    timing: Timing | None = None,
    more: JsonObject = _NOTHING,
) -> Result:
    """No episode: it has no reward and no traces, and its metadata say why. ``more`` is added to them."""
    own: JsonObject = {"failure": {"kind": kind, "message": why}}
    trajectory: JsonObject = {
        "status": ERROR,
        "metadata": {"builder": BUILDER, "record_count": 0, "task_metadata": told, **more},
        "traces": [],
        "error": why,
    }
    body = _body(session_id, task_id, trajectory, {**told, **more, "openhands_rl": own}, timing or Timing(), None)
    return Result(state=RolloutState.ERROR, body=body)


def _body(
    session_id: str, task_id: str, trajectory: JsonObject, metadata: JsonObject, timing: Timing, node: str | None
) -> str:
    found: JsonObject = {
        "session_id": session_id,
        "task_id": task_id,
        "status": trajectory["status"],
        "trajectory": trajectory,
        "timing": timing.model_dump(),
        "node_id": node,
        "error": trajectory["error"],
        "metadata": metadata,
    }
    return json.dumps(found, allow_nan=False, separators=(",", ":"))


def packed(body: str) -> bytes:
    """A result as it lies in the queue."""
    return zlib.compress(body.encode(), 3)


def unpacked(body: bytes) -> str:
    """The inverse of ``packed``."""
    return zlib.decompress(body).decode()


ENDED = frozenset({RolloutState.COMPLETED, RolloutState.ERROR, RolloutState.TIMEOUT, RolloutState.CANCELLED})
