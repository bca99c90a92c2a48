"""What a result means for the other episodes of its task, which are a group: when the rest is not wanted any more.

A group is decided when as many of its episodes can be trained on as its task asks for, and stale when the trainer has
submitted tasks of much newer weights. What is cancelled then has a result of its own kind: no reward and no traces. The
first to end are the short ones, so what is trained on is shorter than what the policy does; ``length_bias`` says by how
much it may be.
"""

from __future__ import annotations

import sqlite3

from openhands_rl_plugin.contrib.rollouts.events import note
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.states import (
    Result,
    RolloutState,
    TaskStatus,
    failed_result,
    packed,
)
from openhands_rl_plugin.core.types import JsonObject

DECIDED, STALE = "minimum_usable_sessions_reached", "stale_policy"
CANCELLED = "cancelled"
"""The kind of failure of what was cancelled; it is nobody's fault."""


def note_state(db: sqlite3.Connection, task_id: str, session_id: str, state: RolloutState) -> None:
    """An episode is in another state."""
    note(db, "session.state_changed", {"task_id": task_id, "session_id": session_id, "status": state.value})


def fail(db: sqlite3.Connection, session: sqlite3.Row, why: str, now: float) -> None:
    """End an episode that nobody can play."""
    told = _request(db, session["task_id"]).told
    _end(db, session, failed_result(session["session_id"], session["task_id"], why, told, kind="infrastructure"), now)


def after_result(db: sqlite3.Connection, task_id: str, now: float) -> None:
    """Say how far the task is, cancel what it needs no more, and end it with its last episode."""
    total, ended, usable = db.execute(
        "SELECT COUNT(*), COUNT(result), SUM(usable) FROM sessions WHERE task_id = ?", (task_id,)
    ).fetchone()
    wanted = _request(db, task_id).early_stop_min_usable_sessions
    if wanted is not None and usable >= wanted and ended < total:
        why = f"cancelled: {usable} episodes of the group can be trained on, and {wanted} are wanted"
        own: JsonObject = {"early_stop_min_usable_sessions": wanted, "early_stop_usable_sessions": usable}
        _cancel_rest(db, task_id, DECIDED, why, own, now)
        ended = total
    db.execute("UPDATE tasks SET updated = ? WHERE task_id = ?", (now, task_id))
    note(db, "task.updated", {"task_id": task_id, "completed_sessions": ended, "total_sessions": total})
    if ended == total:
        end_task(db, task_id, TaskStatus.COMPLETED, now)


def cancel_stale(db: sqlite3.Connection, most: int, now: float) -> None:
    """Cancel the rest of the groups whose weights are more than ``most`` versions behind the newest that is known."""
    newest = db.execute("SELECT MAX(policy_version) FROM tasks").fetchone()[0]
    if newest is None:
        return
    stale = db.execute(
        "SELECT task_id, policy_version FROM tasks WHERE status = ? AND policy_version < ?",
        (TaskStatus.RUNNING, newest - most),
    ).fetchall()
    for row in stale:
        why = f"cancelled: its weights are of version {row['policy_version']}, and the newest are of version {newest}"
        _cancel_rest(db, row["task_id"], STALE, why, {"newest_policy_version": newest}, now)
        end_task(db, row["task_id"], TaskStatus.COMPLETED, now)


def end_task(db: sqlite3.Connection, task_id: str, status: TaskStatus, now: float) -> None:
    """The task is over; whoever submitted it is told, unless it was deleted."""
    url = _request(db, task_id).callback_url
    due = now if url is not None and status is TaskStatus.COMPLETED else None
    db.execute(
        "UPDATE tasks SET status = ?, updated = ?, callback_at = ? WHERE task_id = ?", (status, now, due, task_id)
    )
    note(db, "task.completed", {"task_id": task_id, "status": status.value})


def length_bias(db: sqlite3.Connection, task_id: str | None = None) -> JsonObject | None:
    """Seconds of episodes that can be trained on and of those that were cancelled, of a task or of all; ``None`` where
    none was. A cancelled one would have taken longer than it had."""
    where, of = ("", ()) if task_id is None else (" AND task_id = ?", (task_id,))
    count, begun, seconds = db.execute(
        "SELECT COUNT(*), COUNT(seconds), AVG(seconds) FROM sessions "
        f"WHERE cancelled IN ('{DECIDED}', '{STALE}'){where}",
        of,
    ).fetchone()
    if not count:
        return None
    usable, took, tokens = db.execute(
        f"SELECT COUNT(*), AVG(seconds), AVG(tokens) FROM sessions WHERE usable = 1{where}", of
    ).fetchone()
    return {
        "usable": {"sessions": usable, "mean_seconds": took, "mean_completion_tokens": tokens},
        "cancelled": {"sessions": count, "begun": begun, "mean_seconds_at_least": seconds},
    }


def _cancel_rest(db: sqlite3.Connection, task_id: str, reason: str, why: str, more: JsonObject, now: float) -> None:
    """Take what has no result from its workers, which stop when they notice; a result that comes later is refused."""
    told = _request(db, task_id).told
    rest = db.execute("SELECT * FROM sessions WHERE task_id = ? AND ended IS NULL", (task_id,)).fetchall()
    for row in rest:
        took = None if row["owner"] is None else now - row["claimed"]
        own: JsonObject = {
            "early_stop_cancelled": True,
            "fully_masked": True,
            "early_stop_reason": reason,
            "early_stop_elapsed_ms": 1000 * (took or 0.0),
        }
        result = failed_result(row["session_id"], task_id, why, told, kind=CANCELLED, more={**own, **more})
        _end(db, row, result.model_copy(update={"seconds": took}), now, cancelled=reason)


def _end(db: sqlite3.Connection, session: sqlite3.Row, result: Result, now: float, *, cancelled: str = "") -> None:
    db.execute(
        "UPDATE sessions SET state = ?, waiting = 0, owner = NULL, ended = ?, result = ?, seconds = ?, cancelled = ? "
        "WHERE row = ?",
        (result.state, now, packed(result.body), result.seconds, cancelled, session["row"]),
    )
    note_state(db, session["task_id"], session["session_id"], result.state)


def _request(db: sqlite3.Connection, task_id: str) -> TaskRequest:
    found = db.execute("SELECT request FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    return TaskRequest.model_validate_json(found["request"])
