"""The rollout service: its routes, a worker that really plays, and the whole service killed at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_model import ScriptedModel, says, serve
from starlette.testclient import TestClient

from evaluation.performance.hosts.instant_model import instant_model
from openhands_rl_plugin import FileTrajectoryStorage, cli
from openhands_rl_plugin.config.host import installed_hosts
from openhands_rl_plugin.contrib.rollouts.app import RolloutDoor, build_app
from openhands_rl_plugin.contrib.rollouts.callbacks import send_due
from openhands_rl_plugin.contrib.rollouts.keeper import Keeper
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.worker import Orders, work
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.models.balancing.balancer import Balancer, running_balancer

RELEASED = threading.Event()
SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"


async def until_released(_: dict[str, Any]) -> dict[str, Any]:
    """Other calls are answered meanwhile."""
    await asyncio.to_thread(RELEASED.wait, 60)
    return says(SEARCH)


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        server.context = 4096
        server.policies |= {"base": lambda _: says(SEARCH), "held": until_released}
        server.scripts["base"].clear()
        yield server


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    queue = JobQueue(tmp_path / "store")
    yield queue
    queue.close()


def service(url: str = "http://127.0.0.1:9/v1", **more: object) -> ServiceOptions:
    return ServiceOptions.model_validate({"base_url": url, "model": "base", "max_turns": 2, **more})


@pytest.fixture
def client(queue: JobQueue, tmp_path: Path) -> TestClient:
    """Without the lifespan, so without workers."""
    options = service()
    keeper = Keeper(queue, Orders(folder=tmp_path / "store", service=options))
    return TestClient(build_app(queue, keeper, options, lambda stop: None))


@contextlib.asynccontextmanager
async def working(folder: Path, options: ServiceOptions, balancer: str = "") -> AsyncIterator[None]:
    stopped = asyncio.Event()
    worker = asyncio.create_task(work(Orders(folder=folder, service=options, balancer=balancer), stopped))
    yield
    stopped.set()
    await worker


def submission(task_id: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "Buy socks.",
        "agent": {"harness": "openhands", "settings": {"step_limit": 2, "model_kwargs": {"top_p": 1.0}}},
        "metadata": {"task": "webshop-3", "group_id": 5, "policy_version": 2, "rollout_step": 1},
        **more,
    }


def test_routes(client: TestClient):
    assert client.get("/health").json() == {"status": "ok", "nodes": 1}
    assert client.post("/rollout/task/submit", json=submission(num_samples=2)).json() == {
        "task_id": "a",
        "status": "running",
    }
    assert client.post("/rollout/task/submit", json=submission()).status_code == 409
    assert client.get("/rollout/task/a").json() == {
        "task_id": "a",
        "status": "running",
        "total_sessions": 2,
        "completed_sessions": 0,
        "result_paths": [],
        "length_bias": None,
        "results": [],
    }
    assert client.get("/rollout/status").json()["pipeline"]["pending_sessions"] == 2
    assert [each["num_samples"] for each in client.get("/tasks?status=running&limit=5").json()["tasks"]] == [2]
    assert len(client.get("/tasks/a/sessions").json()["sessions"]) == 2
    assert client.delete("/rollout/task/a").json()["status"] == "cancelled"
    assert client.delete("/rollout/task/b").status_code == 404
    assert client.delete("/rollout/task/b?register_if_missing=true").json()["status"] == "cancelled"
    assert client.post("/rollout/task/submit", json=submission("b")).status_code == 409


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metadata": {}}, "metadata.task: which task?"),
        ({"metadata": {"task": "/etc/passwd"}}, "files of this machine are not read"),
        ({"metadata": {"task": "rows.jsonl"}}, "files of this machine are not read"),
        ({"runtime": {"backend": "docker"}}, "runtime: Value error, is not offered"),
        ({"evaluator": {"strategy": "swe"}}, "evaluator: Value error, is not offered"),
        ({"agent": {"harness": "codex"}}, "agent.harness: 'codex' is not played here"),
        ({"agent": {"settings": {"base_url": "http://x"}}}, "agent.settings.base_url: not offered"),
        ({"agent": {"settings": {"max_turns": 0}}}, "agent.settings.max_turns"),
        ({"agent": {"settings": {"model_kwargs": {"top_k": 5}}}}, "are no samples of the policy"),
        ({"callback_url": "file:///etc/passwd"}, "must be an http"),
        ({"callback_url": "http://me:secret@127.0.0.1/"}, "must hold no password"),
        ({"num_samples": 2, "early_stop_min_usable_sessions": 3}, "cannot be more than num_samples"),
        ({"task_id": "a/b"}, "no slashes"),
        ({"timeout_seconds": "soon"}, "timeout_seconds"),
        ({"surprise": 1}, "surprise"),
        ({"metadata": {"task": "webshop-3", "agent_timeout": -1}}, "must be a positive number of seconds"),
        ({"agent": {"settings": {"strategy": "Best"}}}, "did you mean 'BestOfN'"),
    ],
)
def test_what_cannot_be_played_is_refused_at_once(client: TestClient, given: dict[str, Any], said: str):
    answer = client.post("/rollout/task/submit", json=submission(**given))
    assert answer.status_code == 422 and said in answer.json()["detail"], answer.text
    assert client.get("/tasks").json() == {"tasks": []}


def test_a_host_that_is_not_installed_is_refused(client: TestClient):
    for host in {"v0", "v1"} - set(installed_hosts()):
        answer = client.post("/rollout/task/submit", json=submission(agent={"harness": f"openhands_{host}"}))
        assert answer.status_code == 422 and "pip install" in answer.json()["detail"], answer.text


def test_workers_read_their_orders():
    full = service(config=Path("config.toml"), cache=Path("cache"), prepared=2, strategy="BestOfN", temperature=0.5)
    several = ServiceOptions(base_urls=("http://a/v1", "http://b/v1"), model="base")
    for options in (service(), full, several, several.settled):
        orders = Orders(folder=Path("/store"), service=options, balancer="http://127.0.0.1:1")
        assert Orders.from_line(orders.model_dump_json().encode() + b"\n") == orders


def test_a_key_may_come_as_polars_clients_send_it():
    door = RolloutDoor("right")
    assert door.refusal("POST", "/rollout/task/submit", {"x-polar-control-token": "right"}) is None
    for wrong in ({"x-polar-control-token": "wrong"}, {}):
        assert door.refusal("POST", "/rollout/task/submit", wrong) is not None


async def ended(queue: JobQueue, task_id: str) -> dict[str, Any]:
    while True:
        found = json.loads(await asyncio.to_thread(queue.task, task_id) or "{}")
        if found["status"] != "running":
            return found
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_worker_plays(model: ScriptedModel, queue: JobQueue, client: TestClient, tmp_path: Path):
    """Two episodes as Polar's bridges read them, another that nobody can play, the callback, and one that is deleted
    while it is played and leaves its place to them."""
    told: list[dict[str, Any]] = []

    async def take(scope: Any, receive: Any, send: Any) -> None:
        told.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1", 0))
        url = stack.enter_context(serving(take, listener, lifespan="off"))
        task = submission(num_samples=2, callback_url=f"{url}/done")
        assert client.post("/rollout/task/submit", json=task).status_code == 200
        absent = submission("absent", metadata={"task": "webshop-9999"})
        assert client.post("/rollout/task/submit", json=absent).status_code == 200
        held = submission("held", dispatch_priority=1, agent={"model_name": "held"})
        assert client.post("/rollout/task/submit", json=held).status_code == 200
        # Behind one address: a server that is away, and the model.
        balancer = Balancer(["http://127.0.0.1:9/v1", model.url], probe=3600.0)
        root = stack.enter_context(running_balancer(balancer))
        async with working(tmp_path / "store", service(model.url, playing=1), root):
            while client.get("/tasks/held/sessions").json()["sessions"][0]["status"] != "RUNNING":
                await asyncio.sleep(0.05)
            assert client.delete("/rollout/task/held").json()["completed_sessions"] == 0
            done, failed = await ended(queue, "a"), await ended(queue, "absent")
            RELEASED.set()
        assert [server.calls > 0 for server in balancer.servers] == [False, True]
        async with httpx.AsyncClient() as sender:
            await send_due(queue, sender)
            await send_due(queue, sender)
    assert [each["task_id"] for each in told] == ["a"] and told[0]["results"] == done["results"]
    for result in done["results"]:
        assert (result["status"], result["trajectory"]["status"], result["error"]) == ("COMPLETED", "COMPLETED", None)
        assert result["metadata"] | {"openhands_rl": 0} == {**task["metadata"], "openhands_rl": 0}
        (trace,) = result["trajectory"]["traces"]
        assert (trace["reward"], trace["finish_reason"]) == (0.0, "length")
        sizes = {len(trace[name]) for name in ("response_ids", "loss_mask", "response_logprobs")}
        assert len(sizes) == 1 and sum(trace["loss_mask"]) == 2 * (len(SEARCH) + 1) and trace["prompt_ids"]
        assert trace["response_messages"][0]["role"] == "assistant"
        assert result["timing"]["run_ms"] > 0
    assert len({result["metadata"]["openhands_rl"]["trajectory_id"] for result in done["results"]}) == 2
    (refused,) = failed["results"]
    assert (refused["status"], refused["trajectory"]["traces"]) == ("ERROR", []) and "no task 9999" in refused["error"]
    async with FileTrajectoryStorage(tmp_path / "store") as store:
        assert len([each async for each in store.find()]) == 2


async def test_an_episode_that_is_late_names_what_bounded_it(queue: JobQueue, tmp_path: Path):
    metadata = {"task": "webshop-3", "agent_timeout": 1}
    tasks = {"a": {"timeout_seconds": 1}, "b": {"metadata": metadata}, "c": {}}
    for name, own in tasks.items():
        queue.submit(TaskRequest.model_validate(submission(name, agent={"model_name": "late"}, **own)))
    with serve() as model:
        model.delay, model.policies["late"] = 3.0, lambda _: says(SEARCH)
        async with working(tmp_path / "store", service(model.url, timeout=2)):
            errors = [(await ended(queue, name))["results"][0] for name in tasks]
    assert [each["status"] for each in errors] == ["TIMEOUT"] * 3
    assert [each["error"].rpartition(": raise ")[2] for each in errors] == (
        ["timeout_seconds", "metadata.agent_timeout", "--timeout"]
    )


def test_bad_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = ["--store", str(tmp_path / "s")]
    for words, said in (
        ([], "give --base-url URL and --model NAME"),
        (["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--workers", "0"], "--workers"),
        (["--base-url", "http://a/v1", "--base-urls", "http://a/v1,http://b/v1", "--model", "m"], "or --base-urls"),
        (["--base-urls", "http://a/v1,http://a/v1", "--model", "m"], "named twice"),
        (["--base-urls", "http://a/v1,b", "--model", "m"], "must be an http:// or https:// URL"),
        (["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--listen", "0.0.0.0"], "OPENHANDS_RL_API_KEY"),
    ):
        assert cli.main(["rollouts", "serve", *store, *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_service_is_killed_while_it_plays(tmp_path: Path):
    """The server at random moments, and workers alone; at the end every episode was played to its end once."""
    chance, store, done = random.Random(11), tmp_path / "store", dict[str, Any]()
    with instant_model(delay=0.3) as model:
        command = [sys.executable, "-m", "openhands_rl_plugin", "rollouts", "serve", "--store", str(store)]
        command += ["--base-url", model, "--model", "instant", "--max-turns", "4", "--port", "0", "--playing", "3"]
        for kills in range(4):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                url = [process.stdout.readline() for _ in range(2)][1].split()[3].removesuffix("/rollout/task/submit;")
                task = submission(num_samples=6, agent={"harness": "openhands"})
                assert httpx.post(f"{url}/rollout/task/submit", json=task).status_code == 200
                if kills < 3:
                    while not httpx.get(f"{url}/rollout/status").json()["pipeline"]["states"]["RUNNING"]:
                        time.sleep(0.1)
                    time.sleep(chance.uniform(0.0, 3.0))
                    process.kill()
                else:
                    (worker,) = children(process.pid)
                    os.kill(worker, signal.SIGKILL)
                    while (done := httpx.get(f"{url}/rollout/task/a").json())["status"] == "running":
                        time.sleep(0.2)
                    process.terminate()
    assert [each["status"] for each in done["results"]] == ["COMPLETED"] * 6
    ids = [each["metadata"]["openhands_rl"]["trajectory_id"] for each in done["results"]]
    stored = asyncio.run(finished(store))
    assert sorted(stored) == sorted(ids) and len(set(ids)) == 6


def children(pid: int) -> list[int]:
    """A process is listed below the thread that started it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


async def finished(folder: Path) -> list[str]:
    async with FileTrajectoryStorage(folder) as store:
        return [trajectory.id async for trajectory, _ in store.find()]
