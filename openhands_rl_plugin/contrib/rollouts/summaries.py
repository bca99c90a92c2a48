"""What the service shows of tasks and episodes without their results."""

from __future__ import annotations

import json
import sqlite3

from openhands_rl_plugin.contrib.rollouts.database import Database
from openhands_rl_plugin.contrib.rollouts.groups import length_bias
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.states import ENDED, RolloutState, unpacked
from openhands_rl_plugin.core.types import JsonObject, JsonValue

_ENDED = tuple(sorted(ENDED))
_ERRORED = (RolloutState.ERROR, RolloutState.TIMEOUT)
_NEWEST = 1000


def status_of(database: Database) -> JsonObject:
    """How many episodes are in each state, and how the newest tasks stand."""
    with database.reading() as db:
        rows = db.execute("SELECT task_id, status FROM tasks ORDER BY updated DESC LIMIT ?", (_NEWEST,))
        tasks: JsonObject = {row[0]: row[1] for row in rows}
        states = dict.fromkeys((state.value for state in RolloutState), 0)
        states |= {row[0]: row[1] for row in db.execute("SELECT state, COUNT(*) FROM sessions GROUP BY state")}
        bias = length_bias(db)
        pending = db.execute("SELECT COUNT(*) FROM sessions WHERE ended IS NULL").fetchone()[0]
    return {"tasks": tasks, "pipeline": {"pending_sessions": pending, "states": {**states}}, "length_bias": bias}


def samples_of(database: Database) -> list[tuple[dict[str, str], float]]:
    """Episodes by state, for ``/metrics``."""
    with database.reading() as db:
        rows = db.execute("SELECT state, COUNT(*) FROM sessions GROUP BY state").fetchall()
    return [({"state": row[0].lower()}, float(row[1])) for row in rows]


def tasks_of(database: Database, status: str | None, since: float, limit: int) -> list[JsonObject]:
    """The newest tasks that changed since then (a Unix time)."""
    with database.reading() as db:
        rows = db.execute(
            "SELECT * FROM tasks WHERE (? IS NULL OR status = ?) AND updated >= ? ORDER BY updated DESC LIMIT ?",
            (status, status, since, limit),
        ).fetchall()
        return [_described(db, row) for row in rows]


def _described(db: sqlite3.Connection, task: sqlite3.Row) -> JsonObject:
    ended, errored = db.execute(
        "SELECT COUNT(result), COALESCE(SUM(state IN (?, ?)), 0) FROM sessions WHERE task_id = ?",
        (*_ERRORED, task["task_id"]),
    ).fetchone()
    agent = TaskRequest.model_validate_json(task["request"]).agent if task["request"] else None
    return {
        "task_id": task["task_id"],
        "status": task["status"],
        "harness": None if agent is None else agent.harness,
        "model": None if agent is None else agent.model_name,
        "num_samples": task["total"],
        "completed_sessions": ended,
        "errored_sessions": errored,
        "created_at": task["created"],
        "updated_at": task["updated"],
    }


def sessions_of(database: Database, task_id: str) -> list[JsonObject] | None:
    """The episodes of a task, those that ended with reward and timing; ``None`` for an unknown task."""
    with database.reading() as db:
        if db.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone() is None:
            return None
        rows = db.execute("SELECT * FROM sessions WHERE task_id = ? ORDER BY sample", (task_id,)).fetchall()
    return [_session(row) for row in rows]


def _session(row: sqlite3.Row) -> JsonObject:
    own: JsonObject = {"session_id": row["session_id"], "task_id": row["task_id"], "status": row["state"]}
    own |= {"attempt": row["attempt"], "node_id": row["owner"]}
    if row["result"] is None:
        return own
    result = json.loads(unpacked(row["result"]))
    traces = result["trajectory"]["traces"]
    reward: JsonValue = traces[-1]["reward"] if traces else None
    return own | {"reward": reward, **{name: result[name] for name in ("node_id", "timing", "error")}}
