"""The queue of the service: what clients and workers do with it, each in one transaction.

An episode has one owner at a time, and a result is stored once, by its owner. A worker that dies loses what it owns to
others (``owners.py``); an episode that it had finished lies in the store of trajectories and is not played again.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.contrib.rollouts.database import Database
from openhands_rl_plugin.contrib.rollouts.events import note
from openhands_rl_plugin.contrib.rollouts.groups import (
    after_result,
    cancel_stale,
    end_task,
    fail,
    length_bias,
    note_state,
)
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.states import (
    ClaimedSession,
    Result,
    RolloutState,
    TaskStatus,
    packed,
    unpacked,
)
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import JsonObject

_REMEMBERED_SECONDS = 300.0
"""How long a task that was deleted before it came is refused."""
_LOSSES = 3
"""Workers that may die with an episode before it is taken for their cause."""


class ConflictError(RLError):
    """The task cannot be taken: another one of this name runs, or it was deleted before it came."""


class FullError(RLError):
    """Too many episodes wait."""


class JobQueue:
    """The queue in ``folder``. For several processes. Every method may raise ``StorageError``.

    ``max_policy_lag``: versions that a task's weights may be behind the newest that a task names; ``None``: any number.
    """

    def __init__(self, folder: Path, *, most_waiting: int = 10_000, max_policy_lag: int | None = None) -> None:
        self.database = Database(folder)
        self._most = most_waiting
        self._lag = max_policy_lag

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def submit(self, request: TaskRequest) -> str:
        """Take a task; its status. The same request again is the same task, until its results were collected: then it
        is played again, as after a trainer's restart with other weights.

        Raises ``ConflictError`` for another one under the name of one that runs, and ``FullError``.
        """
        now = time.time()
        with self.database.writing() as db:
            found = db.execute("SELECT * FROM tasks WHERE task_id = ?", (request.task_id,)).fetchone()
            if found is not None:
                over = found["status"] == TaskStatus.CANCELLED or found["collected"]
                if found["digest"] == request.digest and not over:
                    return str(found["status"])
                if found["status"] == TaskStatus.RUNNING:
                    raise ConflictError(f"task {request.task_id} is already running, with another request")
                if not found["digest"] and now - found["updated"] < _REMEMBERED_SECONDS:
                    raise ConflictError(f"task {request.task_id} was cancelled before submission")
                _forget(db, [request.task_id])
            waiting = db.execute("SELECT COUNT(*) FROM sessions WHERE waiting = 1").fetchone()[0]
            if waiting + request.num_samples > self._most:
                raise FullError(f"{waiting} episodes wait already, and at most {self._most} may: submit it later")
            _add(db, request, now)
            if self._lag is not None:
                cancel_stale(db, self._lag, now)
        return TaskStatus.RUNNING

    def delete(self, task_id: str, *, register_if_missing: bool = False) -> str | None:
        """Cancel what has not ended; the task as JSON, ``None`` for an unknown one."""
        now = time.time()
        with self.database.writing() as db:
            found = db.execute("SELECT status FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
            if found is None:
                if not register_if_missing:
                    return None
                db.execute(
                    "INSERT INTO tasks (task_id, run, digest, request, status, total, created, updated) "
                    "VALUES (?, '', '', '', ?, 0, ?, ?)",
                    (task_id, TaskStatus.CANCELLED, now, now),
                )
            elif found["status"] == TaskStatus.RUNNING:
                db.execute(
                    "UPDATE sessions SET state = ?, waiting = 0, owner = NULL, ended = ?, cancelled = 'deleted' "
                    "WHERE task_id = ? AND ended IS NULL",
                    (RolloutState.CANCELLED, now, task_id),
                )
                end_task(db, task_id, TaskStatus.CANCELLED, now)
            return _task(db, task_id)

    def task(self, task_id: str) -> str | None:
        """A ``TaskStatus`` of Polar's as JSON, with the results that are there; ``None`` for an unknown task."""
        with self.database.reading() as db:
            return _task(db, task_id)

    def collect(self, task_id: str) -> str | None:
        """As ``task``; where it has ended, whoever asked has its results now."""
        with self.database.reading() as db:
            found = _task(db, task_id)
            ended = db.execute(
                "SELECT 1 FROM tasks WHERE task_id = ? AND status <> ? AND NOT collected", (task_id, TaskStatus.RUNNING)
            ).fetchone()
        if ended:
            self.note_collected(task_id)
        return found

    def note_collected(self, task_id: str) -> None:
        """Whoever submitted it has its results."""
        with self.database.writing() as db:
            db.execute(
                "UPDATE tasks SET collected = 1 WHERE task_id = ? AND status <> ?", (task_id, TaskStatus.RUNNING)
            )

    def claim(self, owner: str) -> ClaimedSession | None:
        """The next episode, which is the owner's from now on; ``None`` where nothing waits."""
        now = time.time()
        with self.database.writing() as db:
            found = db.execute(
                "SELECT s.*, t.run, t.request FROM sessions s JOIN tasks t USING (task_id) "
                "WHERE s.waiting = 1 AND s.not_before <= ? ORDER BY s.priority DESC, s.row LIMIT 1",
                (now,),
            ).fetchone()
            if found is None:
                return None
            db.execute(
                "UPDATE sessions SET waiting = 0, owner = ?, claimed = ? WHERE row = ?", (owner, now, found["row"])
            )
            return ClaimedSession(**{name: found[name] for name in ClaimedSession.model_fields})

    def entered(self, session: ClaimedSession, owner: str, state: RolloutState) -> None:
        """An episode of the owner's is in another stage."""
        with self.database.writing() as db:
            done = db.execute(
                "UPDATE sessions SET state = ? WHERE session_id = ? AND owner = ?", (state, session.session_id, owner)
            )
            if done.rowcount:
                note_state(db, session.task_id, session.session_id, state)

    def owned(self, owner: str) -> set[str]:
        """The episodes of an owner; those that were cancelled are not its any more."""
        with self.database.reading() as db:
            return {row[0] for row in db.execute("SELECT session_id FROM sessions WHERE owner = ?", (owner,))}

    def finish(self, session: ClaimedSession, owner: str, result: Result) -> bool:
        """Store the result; false where the episode is not the owner's any more, and nothing is stored."""
        now = time.time()
        with self.database.writing() as db:
            done = db.execute(
                "UPDATE sessions SET state = ?, owner = NULL, ended = ?, usable = ?, seconds = ?, tokens = ?, "
                "result = ? WHERE session_id = ? AND owner = ? AND result IS NULL",
                (
                    *(result.state, now, int(result.usable), result.seconds, result.tokens),
                    *(packed(result.body), session.session_id, owner),
                ),
            )
            if not done.rowcount:
                return False
            note_state(db, session.task_id, session.session_id, result.state)
            after_result(db, session.task_id, now)
            return True

    def again(self, session: ClaimedSession, owner: str, *, delay: float, counts: bool = True) -> None:
        """Give an episode back, to be played after ``delay`` seconds. ``counts``: as an attempt that failed."""
        with self.database.writing() as db:
            done = db.execute(
                "UPDATE sessions SET state = ?, waiting = 1, owner = NULL, not_before = ?, attempt = attempt + ? "
                "WHERE session_id = ? AND owner = ?",
                (RolloutState.REGISTERED, time.time() + delay, int(counts), session.session_id, owner),
            )
            if done.rowcount:
                note_state(db, session.task_id, session.session_id, RolloutState.REGISTERED)

    def owners(self) -> list[str]:
        """Whoever owns an episode."""
        with self.database.reading() as db:
            return [row[0] for row in db.execute("SELECT DISTINCT owner FROM sessions WHERE owner IS NOT NULL")]

    def disown(self, owner: str) -> int:
        """The owner is dead: its episodes wait again, or fail where several died with them; how many there were."""
        now = time.time()
        with self.database.writing() as db:
            lost = db.execute("SELECT * FROM sessions WHERE owner = ?", (owner,)).fetchall()
            for row in lost:
                if row["losses"] + 1 < _LOSSES:
                    db.execute(
                        "UPDATE sessions SET state = ?, waiting = 1, owner = NULL, losses = losses + 1 WHERE row = ?",
                        (RolloutState.REGISTERED, row["row"]),
                    )
                    note_state(db, row["task_id"], row["session_id"], RolloutState.REGISTERED)
                else:
                    why = f"{_LOSSES} workers died while they played it"
                    fail(db, row, why, now)
                    after_result(db, row["task_id"], now)
            return len(lost)

    def forget_before(self, when: float) -> int:
        """Drop tasks that ended before ``when`` (a Unix time), with their results; how many there were."""
        with self.database.writing() as db:
            old = db.execute(
                "SELECT task_id FROM tasks WHERE status <> ? AND updated < ? AND callback_at IS NULL LIMIT 1000",
                (TaskStatus.RUNNING, when),
            ).fetchall()
            _forget(db, [row[0] for row in old])
            return len(old)


def _add(db: sqlite3.Connection, request: TaskRequest, now: float) -> None:
    run = f"rollouts-{uuid.uuid4().hex[:12]}"
    db.execute(
        "INSERT INTO tasks (task_id, run, digest, request, status, total, policy_version, created, updated) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(request.task_id, run, request.digest, request.model_dump_json(), TaskStatus.RUNNING),
            *(request.num_samples, request.policy_version, now, now),
        ),
    )
    note(
        db,
        "task.created",
        {
            "task_id": request.task_id,
            "status": TaskStatus.RUNNING.value,
            "harness": request.agent.harness,
            "model": request.agent.model_name,
            "num_samples": request.num_samples,
        },
    )
    for sample in range(request.num_samples):
        session = f"{run}-{sample}"
        db.execute(
            "INSERT INTO sessions (session_id, task_id, sample, state, priority) VALUES (?, ?, ?, ?, ?)",
            (session, request.task_id, sample, RolloutState.REGISTERED, request.dispatch_priority),
        )
        note_state(db, request.task_id, session, RolloutState.REGISTERED)


def _forget(db: sqlite3.Connection, tasks: Sequence[str]) -> None:
    for table in ("sessions", "tasks"):
        db.executemany(f"DELETE FROM {table} WHERE task_id = ?", [(each,) for each in tasks])


def _task(db: sqlite3.Connection, task_id: str) -> str | None:
    task = db.execute("SELECT task_id, status, total FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task is None:
        return None
    results = [
        unpacked(row[0])
        for row in db.execute(
            "SELECT result FROM sessions WHERE task_id = ? AND result IS NOT NULL ORDER BY sample", (task_id,)
        )
    ]
    head: JsonObject = {
        "task_id": task_id,
        "status": task["status"],
        "total_sessions": task["total"],
        "completed_sessions": len(results),
        "result_paths": [],
        "length_bias": length_bias(db, task_id),
    }
    # Results are JSON already, and may be long.
    return f'{json.dumps(head)[:-1]}, "results": [{",".join(results)}]}}'
