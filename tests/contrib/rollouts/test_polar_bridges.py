"""What the bridges of Polar send and read, beyond the routes (docs/howto/rollout-service.md says of which version)."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from evaluation.performance.serving.balance import stub
from openhands_rl_plugin.contrib.rollouts.app import build_app
from openhands_rl_plugin.contrib.rollouts.callbacks import send_due
from openhands_rl_plugin.contrib.rollouts.keeper import Keeper
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.states import Timing, failed_result
from openhands_rl_plugin.contrib.rollouts.worker import Orders
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.core.types import Message, PolicyRef, Sample, StopReason, StrategySpec
from openhands_rl_plugin.models.balancing.balancer import Balancer, running_balancer
from openhands_rl_plugin.trajectories.exchange.trainers.polar import trajectory_of
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

EVALUATED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "max_tokens": 512,
    "extra_body": {"top_k": -1, "skip_special_tokens": False, "min_tokens": 0, "stop_token_ids": None},
}
"""What Slime's bridge sends with an evaluation where nothing is set."""
CALL = "<function=execute_bash>\n<parameter=command>ls</parameter>\n</function>"


def submission(**more: Any) -> dict[str, Any]:
    own = {"task": "webshop-3", "group_id": 5, "policy_version": 2, "rollout_step": 1}
    return {"task_id": "a", "instruction": "Buy socks.", "agent": {"harness": "openhands"}, "metadata": own, **more}


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobQueue]:
    jobs = JobQueue(tmp_path / "store")
    yield jobs
    jobs.close()


@pytest.fixture
def client(jobs: JobQueue, tmp_path: Path) -> TestClient:
    """Without the lifespan, so without workers."""
    options = ServiceOptions(base_url="http://127.0.0.1:9/v1", model="base")
    keeper = Keeper(jobs, Orders(folder=tmp_path / "store", service=options))
    return TestClient(build_app(jobs, keeper, options, lambda stop: None))


def kwargs(**given: Any) -> dict[str, Any]:
    return submission(agent={"settings": {"model_kwargs": given}}, dispatch_priority=100)


def test_an_evaluation_as_slimes_bridge_sends_it(client: TestClient):
    task = {**kwargs(**EVALUATED), "num_samples": 2, "early_stop_min_usable_sessions": 2}
    assert client.post("/rollout/task/submit", json=task).json() == {"task_id": "a", "status": "running"}


@pytest.mark.parametrize(
    "body", [{"top_k": 20}, {"repetition_penalty": 1.05}, {"min_tokens": 5}, {"stop_token_ids": [1]}, {"seed": 1}, 5]
)
def test_sampling_that_is_not_the_policys_is_refused_in_the_body_too(client: TestClient, body: Any):
    answer = client.post("/rollout/task/submit", json=kwargs(**{**EVALUATED, "extra_body": body}))
    assert answer.status_code == 422 and "agent.settings.model_kwargs.extra_body" in answer.json()["detail"]


def played(*answers: Message) -> PlayedRollout:
    sample = Sample(
        trajectory_id="t",
        leaf=0,
        input_ids=(1, 2, 3),
        mask=(False, True, True),
        logprobs=(0.0, -0.5, -0.25),
        advantage=0.0,
        policy=PolicyRef(base_model="base"),
        spans=((0, 1, 3),),
    )
    own = {"strategy": StrategySpec(name="StandardReAct"), "policy": sample.policy, "stop": StopReason.TERMINATED}
    names = {"trajectory_id": "t", "run_id": "r", "group_id": "g", "task_id": "task", "environment": "swe"}
    said = (Message(role="user", content="Mend it."), *answers)
    return PlayedRollout.model_validate({**names, **own, "reward": 1.0, "segments": (sample,), "messages": said})


def is_an_unparsed_call(message: dict[str, Any]) -> bool:
    """As the bridge to Slime decides it, which then trains the trace with a reward of 0."""
    marks = r"(?:^|\n)\s*</?tool_call>\s*(?:\n|$)|(?:^|\n)\s*<function\s*=.+?>\s*(?:\n|$)"
    return not message.get("tool_calls") and bool(re.search(marks, message["content"] or "", re.IGNORECASE))


def test_calls_in_the_text_are_calls_for_polar():
    """OpenHands V0 without native calls writes them so; the bridge would take the reward away."""
    result = Message(role="user", content=f"EXECUTION RESULT of [execute_bash]:\n{CALL}")
    found = trajectory_of(played(Message(role="assistant", content=f"I look.\n\n{CALL}"), result), {})
    (trace,) = found["traces"]
    first, second = trace["response_messages"]
    assert first["content"] == "I look." and not is_an_unparsed_call(first)
    (call,) = first["tool_calls"]
    assert call["function"]["name"] == "execute_bash" and json.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert second == {"role": "user", "content": result.content}
    assert trace["reward"] == 1.0


def test_a_call_that_cannot_be_read_stays_as_it_was_sampled():
    broken = Message(role="assistant", content="<function=execute_bash>\n<parameter=command>ls\n")
    (trace,) = trajectory_of(played(broken), {})["traces"]
    (message,) = trace["response_messages"]
    assert message == {"role": "assistant", "content": broken.content} and is_an_unparsed_call(message)


def finish(jobs: JobQueue, task_id: str) -> None:
    """Its one episode fails."""
    claimed = jobs.claim("me")
    assert claimed is not None and claimed.task_id == task_id
    jobs.finish(claimed, "me", failed_result(claimed.session_id, task_id, "no", {}, kind="test", timing=Timing()))


def test_a_task_is_the_same_until_its_results_are_there_and_then_played_again(client: TestClient, jobs: JobQueue):
    """A trainer that starts again sends its tasks again, for other weights; one whose submission got no answer, too."""
    task = submission()
    for _ in range(2):
        assert client.post("/rollout/task/submit", json=task).json()["status"] == "running"
    finish(jobs, "a")
    assert client.post("/rollout/task/submit", json=task).json()["status"] == "completed", "nobody has its results"
    assert client.get("/rollout/task/a").json()["completed_sessions"] == 1
    assert client.post("/rollout/task/submit", json=task).json()["status"] == "running"
    assert client.get("/rollout/task/a").json()["completed_sessions"] == 0
    assert client.delete("/rollout/task/a").json()["status"] == "cancelled"
    assert client.post("/rollout/task/submit", json=task).json()["status"] == "running"


async def test_a_callback_that_was_taken_hands_the_results_over(jobs: JobQueue):
    task = TaskRequest.model_validate(submission(callback_url="http://127.0.0.1:9/done"))
    jobs.submit(task)
    finish(jobs, "a")
    assert jobs.submit(task) == "completed"
    with listening("127.0.0.1", 0) as listener, serving(taken, listener, lifespan="off") as url:
        with jobs.database.writing() as db:
            asked = task.model_copy(update={"callback_url": url}).model_dump_json()
            db.execute("UPDATE tasks SET request = ?", (asked,))
        async with httpx.AsyncClient(trust_env=False) as sender:
            await send_due(jobs, sender)
    assert jobs.submit(task) == "running"


async def taken(_: Any, receive: Any, send: Any) -> None:
    """Answers a callback as the bridges do."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"ok": true}'})


async def test_calls_are_held_while_weights_are_replaced(jobs: JobQueue, tmp_path: Path):
    """The newest bridge to Slime asks ``/nodes``, pauses each of them, and resumes them after it."""
    options = ServiceOptions(base_urls=("http://127.0.0.1:9/v1",), model="base")
    with ExitStack() as opened:
        _, model = opened.enter_context(stub(0.5))
        balancer = Balancer([model])
        behind = opened.enter_context(running_balancer(balancer))
        keeper = Keeper(jobs, Orders(folder=tmp_path / "store", service=options))
        service = TestClient(build_app(jobs, keeper, options, lambda stop: None, balancer), base_url="http://me:1")
        (node,) = service.get("/nodes").json()
        assert (node["gateway_url"], node["healthy"]) == ("http://me:1", True)
        sender = await asyncio.to_thread(httpx.AsyncClient, trust_env=False)
        call = lambda: asyncio.create_task(sender.post(f"{behind}/session/e/v1/chat/completions", json={}))  # noqa: E731
        first = call()
        while not balancer.servers[0].open:
            await asyncio.sleep(0.01)
        early = await asyncio.to_thread(service.post, "/admin/inference/pause?timeout_seconds=0.1")
        assert early.status_code == 504 and "1 calls of the model were still open" in early.json()["detail"]
        assert not first.done()
        held = await asyncio.to_thread(service.post, "/admin/inference/pause?timeout_seconds=60")
        assert held.json() == {"paused": True, "inflight": 0}
        assert (await first).status_code == 200 and balancer.servers[0].calls == 1
        second = call()
        await asyncio.sleep(0.8)
        assert not second.done() and balancer.servers[0].open == 0
        assert service.post("/admin/inference/resume").json()["paused"] is False
        assert (await second).status_code == 200
        await sender.aclose()


async def test_a_pause_of_a_trainer_that_died_ends_and_one_that_is_renewed_goes_on(
    jobs: JobQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with ExitStack() as opened:
        _, model = opened.enter_context(stub(0.01))
        options = ServiceOptions(base_urls=(model,), model="base", longest_pause=2.0)
        balancer = Balancer(options.base_urls)
        behind = opened.enter_context(running_balancer(balancer))
        keeper = Keeper(jobs, Orders(folder=tmp_path / "store", service=options))
        service = TestClient(build_app(jobs, keeper, options, lambda stop: None, balancer))
        pause = lambda: asyncio.to_thread(service.post, "/admin/inference/pause")  # noqa: E731
        assert (await pause()).json()["paused"]
        sender = await asyncio.to_thread(httpx.AsyncClient, trust_env=False)
        call = asyncio.create_task(sender.post(f"{behind}/v1/chat/completions", json={}))
        await asyncio.sleep(0.3)
        renewed = time.monotonic()
        assert (await pause()).json()["paused"]
        assert (await call).status_code == 200 and time.monotonic() - renewed >= options.longest_pause
        said = "nobody resumed the calls of the model within 2 s of the last pause: they go on"
        assert caplog.messages.count(said) == 1
        assert (await pause()).json()["paused"] and service.post("/admin/inference/resume").status_code == 200
        await asyncio.sleep(2.1)
        assert caplog.messages.count(said) == 1, "what was resumed does not lapse"
        await sender.aclose()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_a_pause_is_bounded(client: TestClient, seconds: str):
    assert client.post(f"/admin/inference/pause?timeout_seconds={seconds}").status_code == 400


def test_without_a_balancer_nothing_is_held(client: TestClient):
    for action in ("pause", "resume"):
        answer = client.post(f"/admin/inference/{action}")
        assert answer.status_code == 409 and "start with --base-urls" in answer.json()["detail"]
