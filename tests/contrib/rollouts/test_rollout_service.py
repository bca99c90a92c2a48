"""The rollout service: its routes, and episodes in Ray actors of a real cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_model import ScriptedModel, reply, serve
from starlette.testclient import TestClient

from openhands_rl_plugin import FileTrajectoryStorage, cli
from openhands_rl_plugin.contrib.rollouts.requests import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.service import Rollouts, running_service

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'openhands_rl_plugin[ray]'"
)
SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"
EVALUATED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "max_tokens": 512,
    "extra_body": {"top_k": -1, "skip_special_tokens": False, "min_tokens": 0, "stop_token_ids": None},
}
"""What Slime's bridge sends with an evaluation where nothing is set."""


def service(url: str = "http://127.0.0.1:9/v1", **more: object) -> ServiceOptions:
    return ServiceOptions.model_validate({"base_url": url, "model": "base", "max_turns": 2, "port": 0, **more})


@pytest.fixture
def client() -> TestClient:
    """Without the lifespan, so without actors."""
    return TestClient(Rollouts(service()).app(None))


def submission(task_id: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "Buy socks.",
        "agent": {"harness": "openhands", "settings": {"step_limit": 2, "model_kwargs": EVALUATED}},
        "metadata": {"task": "webshop-3", "group_id": 5, "policy_version": 2},
        **more,
    }


def test_routes(client: TestClient):
    assert client.get("/health").json() == {"status": "ok", "nodes": 1}
    running = {"task_id": "a", "status": "running"}
    for _ in range(2):
        assert client.post("/rollout/task/submit", json=submission(num_samples=2)).json() == running
    assert client.post("/rollout/task/submit", json=submission()).status_code == 409
    assert client.get("/rollout/task/a").json() == {
        **running,
        "total_sessions": 2,
        "completed_sessions": 0,
        "result_paths": [],
        "results": [],
    }
    assert client.get("/rollout/status").json()["pipeline"]["pending_sessions"] == 2
    assert client.delete("/rollout/task/a").json()["status"] == "cancelled"
    assert client.delete("/rollout/task/b").status_code == 404


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"metadata": {}}, "metadata.task: which task?"),
        ({"metadata": {"task": "/etc/passwd"}}, "files of this machine are not read"),
        *(
            (
                {"metadata": {"task": {"instance_id": "a", "base_commit": "b", **row}}},
                "files of this machine are not read",
            )
            for row in (
                {"source": {"git": "/srv/private", "commit": "HEAD"}},
                {"environment": "module:Class"},
            )
        ),
        *(
            ({"agent": {"settings": {name: value}}}, "files of this machine are not read")
            for name, value in (("suite", "rows.jsonl"), ("strategy", "module:Class"))
        ),
        ({"runtime": {"backend": "docker"}}, "runtime: Input should be null"),
        ({"agent": {"settings": {"base_url": "http://x"}}}, "agent.settings.base_url: not offered"),
        ({"agent": {"settings": {"model_kwargs": {"top_p": 0.5}}}}, "are no samples of the policy"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_rolled_out_is_refused_at_once(client: TestClient, given: dict[str, Any], why: str):
    answer = client.post("/rollout/task/submit", json=submission(**given))
    assert answer.status_code == 422 and why in answer.json()["detail"], answer.text
    assert client.get("/rollout/status").json()["tasks"] == {}


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--store", str(tmp_path)]
    assert cli.main(["rollouts", "serve", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "openhands_rl_plugin[ray]" in line


def ended(url: str, task_id: str) -> list[dict[str, Any]]:
    while (found := httpx.get(f"{url}/rollout/task/{task_id}").json())["status"] == "running":
        time.sleep(0.1)
    return found["results"]


def until_running(url: str, episodes: int) -> None:
    while httpx.get(f"{url}/rollout/status").json()["pipeline"]["states"]["RUNNING"] < episodes:
        time.sleep(0.05)


def actors() -> list[int]:
    """The processes of the service's Ray actors."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if (folder / "cmdline").read_bytes().startswith(b"ray::Player"):
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
    return found


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
class TestCluster:
    @pytest.fixture(scope="class")
    def model(self) -> Iterator[ScriptedModel]:
        with serve() as model:
            model.context = 4096
            model.policies["base"] = lambda _: reply(SEARCH)
            model.scripts["base"].clear()
            yield model

    @pytest.fixture(scope="class")
    def url(self, model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        import ray  # an extra

        self.__class__.folder = tmp_path_factory.mktemp("rollouts")  # type: ignore[attr-defined]
        with ExitStack() as stack:
            if "RAY_ADDRESS" not in os.environ:  # with two CPUs, whatever the machine has
                os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
                ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
            stack.callback(ray.shutdown)
            folder: Path = self.__class__.folder  # type: ignore[attr-defined]
            yield stack.enter_context(running_service(service(model.url, concurrency=2), str(folder)))

    def test_a_group(self, url: str):
        """A result as Polar's bridges read it, with what can be trained on, and one that has no task."""
        task = submission(num_samples=2)
        assert httpx.post(f"{url}/rollout/task/submit", json=task).status_code == 200
        results = ended(url, "a")
        for result in results:
            assert (result["status"], result["error"]) == (result["trajectory"]["status"], None) == ("COMPLETED", None)
            assert result["metadata"] | {"openhands_rl": 0} == {**task["metadata"], "openhands_rl": 0}
            (trace,) = result["trajectory"]["traces"]
            assert (trace["reward"], trace["finish_reason"]) == (0.0, "length")
            sizes = {len(trace[name]) for name in ("response_ids", "loss_mask", "response_logprobs")}
            assert len(sizes) == 1 and sum(trace["loss_mask"]) == 2 * (len(SEARCH) + 1) and trace["prompt_ids"]
            assert result["timing"]["run_ms"] > 0

        async def stored() -> list[str]:
            async with FileTrajectoryStorage(self.folder) as store:  # type: ignore[attr-defined]
                return sorted([trajectory.id async for trajectory, _ in store.find()])

        assert asyncio.run(stored()) == sorted(each["metadata"]["openhands_rl"]["trajectory_id"] for each in results)
        absent = submission("absent", metadata={"task": "webshop-9999"})
        assert httpx.post(f"{url}/rollout/task/submit", json=absent).status_code == 200
        (refused,) = ended(url, "absent")
        assert (refused["status"], refused["trajectory"]["traces"]) == ("ERROR", [])
        assert "no task 9999" in refused["error"]

    def test_an_actor_that_dies_loses_nothing(self, url: str, model: ScriptedModel):
        model.delay = 1.0
        assert httpx.post(f"{url}/rollout/task/submit", json=submission("killed", num_samples=3)).status_code == 200
        until_running(url, 2)
        (actor,) = actors()
        os.kill(actor, signal.SIGKILL)
        model.delay = 0.0
        assert [each["status"] for each in ended(url, "killed")] == ["COMPLETED"] * 3

    def test_what_is_cancelled_leaves_its_place(self, url: str, model: ScriptedModel):
        model.delay = 300.0
        assert httpx.post(f"{url}/rollout/task/submit", json=submission("deleted", num_samples=2)).status_code == 200
        until_running(url, 2)
        model.delay = 0.0
        assert httpx.delete(f"{url}/rollout/task/deleted").json()["status"] == "cancelled"
        assert httpx.post(f"{url}/rollout/task/submit", json=submission("next")).status_code == 200
        assert [each["status"] for each in ended(url, "next")] == ["COMPLETED"]
        assert httpx.get(f"{url}/rollout/task/deleted").json()["results"] == []
