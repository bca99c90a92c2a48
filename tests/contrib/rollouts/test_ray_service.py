"""The rollout service with workers on a real Ray cluster, which is started on this machine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from scripted_model import ScriptedModel, says, serve

from evaluation.performance.hosts.instant_model import instant_model
from openhands_rl_plugin import FileTrajectoryStorage, cli
from openhands_rl_plugin.contrib.rollouts.server import running_service
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions

try:
    import ray
except ModuleNotFoundError:
    ray = None

needs_ray = pytest.mark.skipif(ray is None, reason="Ray is not installed: pip install 'openhands_rl_plugin[ray]'")
on_a_cluster = [needs_ray, pytest.mark.slow, pytest.mark.timeout(900)]
SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"
LONG = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with four CPUs, whatever the machine has; this process is connected to it."""
    assert ray is not None
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


class Served(NamedTuple):
    url: str
    folder: Path
    model: ScriptedModel

    def submit(self, task_id: str, samples: int) -> None:
        task = {"task_id": task_id, "num_samples": samples, "metadata": {"task": "webshop-3"}}
        assert httpx.post(f"{self.url}/rollout/task/submit", json=task).status_code == 200

    def states(self) -> dict[str, int]:
        return httpx.get(f"{self.url}/rollout/status").json()["pipeline"]["states"]

    def until_it_plays(self, episodes: int) -> None:
        while self.states()["RUNNING"] < episodes:
            time.sleep(0.05)

    def ended(self, task_id: str) -> list[dict[str, Any]]:
        return results_of(self.url, task_id)


def results_of(url: str, task_id: str) -> list[dict[str, Any]]:
    while (done := httpx.get(f"{url}/rollout/task/{task_id}").json())["status"] == "running":
        time.sleep(0.1)
    return done["results"]


def ids_of(results: list[dict[str, Any]]) -> list[str]:
    return sorted(each["metadata"]["openhands_rl"]["trajectory_id"] for each in results)


def stored_in(folder: Path) -> list[str]:
    async def found() -> list[str]:
        async with FileTrajectoryStorage(folder) as store:
            return sorted([trajectory.id async for trajectory, _ in store.find()])

    return asyncio.run(found())


def actors() -> list[int]:
    """The processes of the actors, below this one."""
    found, look = [], [os.getpid()]
    while look:
        pid = look.pop()
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # a thread that has ended
                look += map(int, children.read_text().split())
        with suppress(OSError):
            if b"RolloutActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


class TestCluster:
    pytestmark = on_a_cluster

    @pytest.fixture(scope="class")
    def served(self, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        folder = tmp_path_factory.mktemp("rollouts") / "store"
        with ExitStack() as stack:
            model = stack.enter_context(serve())
            model.context, model.delay = 4096, 0.3
            model.policies["base"] = lambda _: says(SEARCH)
            model.scripts["base"].clear()
            options = {"base_url": model.url, "model": "base", "max_turns": 4, "port": 0, "executor": "ray"}
            service = ServiceOptions.model_validate({**options, "workers": 2, "playing": 2})
            yield Served(stack.enter_context(running_service(service, folder)), folder, model)

    def test_two_actors_play_a_group(self, served: Served) -> None:
        served.submit("group", 6)
        results = served.ended("group")
        assert [each["status"] for each in results] == ["COMPLETED"] * 6
        assert {each["trajectory"]["traces"][0]["reward"] for each in results} == {0.0}
        assert len({each["node_id"] for each in results}) == 2
        assert set(ids_of(results)) <= set(stored_in(served.folder))
        assert len(set(ids_of(results))) == 6

    def test_an_actor_that_dies_loses_nothing(self, served: Served) -> None:
        before = stored_in(served.folder)
        served.submit("killed", 8)
        served.until_it_plays(3)
        playing = actors()
        os.kill(playing[0], signal.SIGKILL)
        results = served.ended("killed")
        assert [each["status"] for each in results] == ["COMPLETED"] * 8
        assert sorted(stored_in(served.folder)) == sorted([*before, *ids_of(results)])
        with_another = time.monotonic() + 60
        while len(now := actors()) < 2 and time.monotonic() < with_another:
            time.sleep(0.1)
        assert len(now) == 2 and playing[0] not in now

    def test_what_is_deleted_is_not_played_on(self, served: Served) -> None:
        """Each of its answers would take two minutes; the places that it held are free at once."""
        served.model.delay = LONG
        served.submit("deleted", 4)
        served.until_it_plays(4)
        served.model.delay, begun = 0.0, time.monotonic()
        assert httpx.delete(f"{served.url}/rollout/task/deleted").json()["status"] == "cancelled"
        served.submit("next", 2)
        assert [each["status"] for each in served.ended("next")] == ["COMPLETED"] * 2
        assert time.monotonic() - begun < LONG / 2
        assert httpx.get(f"{served.url}/rollout/task/deleted").json()["results"] == []


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_service_is_killed_while_its_actors_play(cluster: str, tmp_path: Path) -> None:
    """Its actors end with it, on a cluster that goes on; the same command goes on with what they had."""
    chance, store, results = random.Random(5), tmp_path / "store", list[dict[str, Any]]()
    command = [sys.executable, "-m", "openhands_rl_plugin", "rollouts", "serve", "--store", str(store), "--port", "0"]
    command += ["--model", "instant", "--max-turns", "4", "--playing", "2", "--workers", "2", "--executor", "ray"]
    with instant_model(delay=0.5) as model:
        for kills in range(3):
            told = {**os.environ, "RAY_ADDRESS": cluster}
            with subprocess.Popen(
                [*command, "--base-url", model], stdout=subprocess.PIPE, text=True, env=told
            ) as process:
                assert process.stdout is not None
                said = [process.stdout.readline() for _ in range(2)]
                url = said[1].split()[3].removesuffix("/rollout/task/submit;")
                served = Served(url, store, ScriptedModel(model))
                served.submit("a", 8)
                if kills < 2:
                    while not (had := actors()):  # until then episodes may still be noted as the former one left them
                        time.sleep(0.1)
                    served.until_it_plays(2)
                    time.sleep(chance.uniform(0.0, 2.0))
                    process.kill()
                    gone = time.monotonic() + 60
                    while set(had) & set(actors()) and time.monotonic() < gone:
                        time.sleep(0.1)
                    assert had and not set(had) & set(actors())
                else:
                    results = served.ended("a")
                    process.terminate()
            assert process.returncode == (-signal.SIGKILL if kills < 2 else 0)
    assert [each["status"] for each in results] == ["COMPLETED"] * 8
    assert stored_in(store) == ids_of(results) and len(set(ids_of(results))) == 8


@needs_ray
def test_a_cluster_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ray is not None
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    words = ["--store", str(tmp_path), "--base-url", "http://10.0.0.5/v1", "--model", "m", "--executor", "ray"]
    assert cli.main(["rollouts", "serve", *words]) == 1
    printed = capsys.readouterr()
    (line,) = [each for each in printed.err.splitlines() if each.startswith("error: ")]
    assert "the Ray cluster at nonsense cannot be used" in line and not printed.out
