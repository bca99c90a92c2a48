"""The queue of the rollout service: who owns what, what is stored once, and what a killed process leaves."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.contrib.rollouts.database import FILE
from openhands_rl_plugin.contrib.rollouts.events import events_after, newest
from openhands_rl_plugin.contrib.rollouts.owners import living_owner, only_server, release_dead, remove_dead
from openhands_rl_plugin.contrib.rollouts.queue import ConflictError, FullError, JobQueue
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.states import ClaimedSession, Result, RolloutState
from openhands_rl_plugin.contrib.rollouts.summaries import sessions_of, status_of, tasks_of
from openhands_rl_plugin.core.errors import ConfigError, StorageError

HELPER = Path(__file__).parents[2] / "helpers/servers/keep_claiming.py"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    queue = JobQueue(tmp_path, most_waiting=100)
    yield queue
    queue.close()


def request(task_id: str = "a", **more: object) -> TaskRequest:
    return TaskRequest.model_validate({"task_id": task_id, "metadata": {"task": "webshop-3"}, **more})


def result(name: str = "x", *, usable: bool = True) -> Result:
    return Result(
        state=RolloutState.COMPLETED, body=json.dumps({"name": name, "trajectory": {"traces": []}}), usable=usable
    )


def task(queue: JobQueue, task_id: str = "a") -> dict[str, Any]:
    found = queue.task(task_id)
    assert found is not None
    return json.loads(found)


def claimed(queue: JobQueue, owner: str = "w") -> ClaimedSession:
    session = queue.claim(owner)
    assert session is not None
    return session


def test_a_task_is_taken_once(queue: JobQueue):
    assert queue.submit(request(num_samples=2)) == "running"
    assert queue.submit(request(num_samples=2)) == "running"
    assert task(queue)["total_sessions"] == 2
    with pytest.raises(ConflictError, match="already running"):
        queue.submit(request(num_samples=3))
    first, second = claimed(queue), claimed(queue)
    assert (first.sample, second.sample, queue.claim("w")) == (0, 1, None)
    assert queue.finish(second, "w", result("two")) and queue.finish(first, "w", result("one"))
    done = task(queue)
    assert (done["status"], done["completed_sessions"]) == ("completed", 2)
    assert [each["name"] for each in done["results"]] == ["one", "two"]
    assert queue.submit(request(num_samples=2)) == "completed"  # the answer to a submission that was lost
    assert queue.submit(request(num_samples=3)) == "running"  # another task of the same name, after its end
    assert task(queue)["results"] == []


def test_a_result_is_stored_once_by_the_owner(queue: JobQueue):
    queue.submit(request())
    session = claimed(queue, "slow")
    assert queue.owned("slow") == {session.session_id}
    assert queue.disown("slow") == 1
    again = claimed(queue, "next")
    assert again.session_id == session.session_id and again.run == session.run and again.attempt == 0
    assert not queue.finish(session, "slow", result("late"))
    assert queue.finish(again, "next", result("right")) and not queue.finish(again, "next", result("twice"))
    assert [each["name"] for each in task(queue)["results"]] == ["right"]


def test_higher_priorities_begin_first(queue: JobQueue):
    queue.submit(request("low"))
    queue.submit(request("high", dispatch_priority=100))
    queue.submit(request("also high", dispatch_priority=100))
    assert [claimed(queue).task_id for _ in range(3)] == ["high", "also high", "low"]


def test_a_failed_try_waits_and_counts(queue: JobQueue):
    queue.submit(request())
    session = claimed(queue)
    queue.again(session, "w", delay=3600.0)
    assert queue.claim("w") is None
    queue.submit(request("b"))
    other = claimed(queue)
    queue.again(other, "w", delay=0.0, counts=False)
    assert claimed(queue).attempt == 0
    assert sessions_of(queue.database, "a") == [
        {"session_id": session.session_id, "task_id": "a", "status": "REGISTERED", "attempt": 1, "node_id": None}
    ]


def test_an_episode_that_workers_die_of_fails(queue: JobQueue):
    queue.submit(request(metadata={"task": "webshop-3", "group_id": 4}))
    for number in range(3):
        claimed(queue, f"w{number}")
        queue.disown(f"w{number}")
    (failed,) = task(queue)["results"]
    assert (failed["status"], failed["trajectory"]["traces"]) == ("ERROR", [])
    assert "3 workers died" in failed["error"] and failed["metadata"]["group_id"] == 4
    assert failed["metadata"]["openhands_rl"]["failure"]["kind"] == "infrastructure"


def test_deletion(queue: JobQueue):
    queue.submit(request(num_samples=3))
    first, _ = claimed(queue), claimed(queue)
    queue.finish(first, "w", result("kept"))
    deleted = json.loads(queue.delete("a") or "")
    assert (deleted["status"], deleted["completed_sessions"]) == ("cancelled", 1)
    assert queue.owned("w") == set() and queue.claim("w") is None
    assert queue.delete("unknown") is None
    assert json.loads(queue.delete("early", register_if_missing=True) or "")["status"] == "cancelled"
    with pytest.raises(ConflictError, match="cancelled before submission"):
        queue.submit(request("early"))


def test_the_rest_of_a_decided_group_is_cancelled(queue: JobQueue):
    """As soon as two can be trained on; the others are typed, have no reward, and what comes later is refused."""
    metadata = {"task": "webshop-3", "group_id": 9}
    queue.submit(request(num_samples=5, early_stop_min_usable_sessions=2, metadata=metadata))
    sessions = [claimed(queue) for _ in range(4)]
    queue.finish(sessions[0], "w", result(usable=False))
    queue.finish(sessions[1], "w", result().model_copy(update={"seconds": 2.0, "tokens": 30}))
    assert task(queue)["status"] == "running" and task(queue)["length_bias"] is None
    queue.finish(sessions[2], "w", result().model_copy(update={"seconds": 4.0, "tokens": 50}))
    done = task(queue)
    assert (done["status"], done["completed_sessions"], queue.owned("w"), queue.claim("w")) == (
        "completed",
        5,
        set(),
        None,
    )
    assert not queue.finish(sessions[3], "w", result("late"))
    for late in done["results"][3:]:
        assert (late["status"], late["trajectory"]["traces"], late["metadata"]["group_id"]) == ("ERROR", [], 9)
        assert late["metadata"]["openhands_rl"]["failure"]["kind"] == "cancelled"
        told = {name: value for name, value in late["metadata"].items() if name.startswith(("early", "fully"))}
        assert told.pop("early_stop_elapsed_ms") >= 0
        assert told == {
            "early_stop_cancelled": True,
            "fully_masked": True,
            "early_stop_reason": "minimum_usable_sessions_reached",
            "early_stop_min_usable_sessions": 2,
            "early_stop_usable_sessions": 2,
        }
    bias = done["length_bias"]
    assert bias["usable"] == {"sessions": 2, "mean_seconds": 3.0, "mean_completion_tokens": 40.0}
    assert (bias["cancelled"]["sessions"], bias["cancelled"]["begun"]) == (2, 1)
    assert status_of(queue.database)["length_bias"] == bias
    assert [each.kind for each in events_after(queue.database, 0)][-1] == "task.completed"


def test_a_stale_group_is_cancelled(tmp_path: Path):
    queue = JobQueue(tmp_path / "lag", max_policy_lag=1)

    def of_version(task_id: str, version: int) -> TaskRequest:
        metadata = {"task": "webshop-3", "policy_version": version}
        return request(task_id, num_samples=2, metadata=metadata, callback_url="http://127.0.0.1:9/done")

    queue.submit(of_version("old", 3))
    queue.finish(claimed(queue), "w", result("in time"))
    running = claimed(queue)
    queue.submit(of_version("newer", 4))
    assert task(queue, "old")["status"] == "running"
    queue.submit(of_version("newest", 5))
    old = task(queue, "old")
    assert old["status"] == "completed" and old["results"][0]["name"] == "in time"
    assert old["results"][1]["metadata"]["early_stop_reason"] == "stale_policy"
    assert not queue.finish(running, "w", result())
    assert [task(queue, name)["status"] for name in ("newer", "newest")] == ["running", "running"]
    queue.submit(of_version("late", 3))
    assert [each["trajectory"]["traces"] for each in task(queue, "late")["results"]] == [[], []]
    queue.close()


def test_only_so_many_wait(queue: JobQueue):
    queue.submit(request(num_samples=90))
    with pytest.raises(FullError, match="90 episodes wait already"):
        queue.submit(request("b", num_samples=11))
    assert queue.task("b") is None


def test_what_is_old_is_dropped(queue: JobQueue):
    queue.submit(request())
    queue.submit(request("running"))
    queue.finish(claimed(queue), "w", result())
    assert queue.forget_before(time.time() + 1) == 1
    assert queue.task("a") is None and queue.task("running") is not None


def test_events_and_summaries(queue: JobQueue):
    queue.submit(request(num_samples=1))
    session = claimed(queue)
    queue.entered(session, "w", RolloutState.RUNNING)
    queue.entered(session, "somebody else", RolloutState.EVALUATING)
    queue.finish(session, "w", result())
    told = [(each.kind, json.loads(each.body).get("status")) for each in events_after(queue.database, 0)]
    assert told == [
        ("task.created", "running"),
        ("session.state_changed", "REGISTERED"),
        ("session.state_changed", "RUNNING"),
        ("session.state_changed", "COMPLETED"),
        ("task.updated", None),
        ("task.completed", "completed"),
    ]
    assert events_after(queue.database, newest(queue.database)) == []
    (summary,) = tasks_of(queue.database, "completed", 0.0, 10)
    assert (summary["completed_sessions"], summary["errored_sessions"]) == (1, 0)
    assert tasks_of(queue.database, "running", 0.0, 10) == []
    assert status_of(queue.database)["tasks"] == {"a": "completed"}


def test_the_living_keep_what_they_have(tmp_path: Path, queue: JobQueue):
    queue.submit(request(num_samples=2))
    with living_owner(tmp_path) as owner:
        claimed(queue, owner)
        claimed(queue, "worker-dead")
        (tmp_path / "workers/worker-dead").touch()
        assert release_dead(queue, tmp_path) == 1
        remove_dead(tmp_path)
        assert [each.name for each in (tmp_path / "workers").iterdir()] == [owner]
    assert release_dead(queue, tmp_path) == 1
    with (
        only_server(tmp_path),
        pytest.raises(ConfigError, match="another rollout service has it"),
        only_server(tmp_path),
    ):
        pass


def test_a_queue_of_the_version_before_goes_on_also_where_several_start_at_once(tmp_path: Path):
    JobQueue(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db, ThreadPoolExecutor() as starters:
        db.executescript("ALTER TABLE tasks DROP COLUMN collected; PRAGMA user_version = 1; BEGIN IMMEDIATE;")
        started = [starters.submit(JobQueue, tmp_path) for _ in range(3)]
        time.sleep(0.5)  # all of them have seen the old version, and wait for the lock
        db.execute("ROLLBACK")
        for each in started:
            queue = each.result(timeout=30)
            queue.submit(request())
            assert '"status": "running"' in (queue.collect("a") or "")
            queue.close()


def test_another_file_is_no_queue(tmp_path: Path):
    (tmp_path / "rollouts.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(StorageError, match=r"rollouts\.sqlite cannot be used"):
        JobQueue(tmp_path)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [7])
def test_kill_9_loses_nothing_and_stores_nothing_twice(seed: int, tmp_path: Path):
    """Four processes at work, of which three are killed at random moments."""
    queue, chance = JobQueue(tmp_path), random.Random(seed)
    command = [sys.executable, str(HELPER), str(tmp_path)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        for number in range(20):
            queue.submit(request(f"t{number}", num_samples=10))
        for victim in workers[:3]:
            time.sleep(chance.uniform(0.0, 0.2))
            victim.kill()
            assert victim.wait() == -9, "it had not ended by itself"
        while {each["status"] for each in tasks_of(queue.database, None, 0.0, 100)} != {"completed"}:
            assert workers[3].poll() is None
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    tasks = [task(queue, f"t{number}") for number in range(20)]
    results = [found for each in tasks for found in each["results"]]
    assert len(results) == len(list(tmp_path.glob("*.stored"))) == 200
    assert len({found["by"] for found in results}) > 1
    queue.close()
