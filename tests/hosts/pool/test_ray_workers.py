"""OpenHands episodes on a real Ray cluster, which is started on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import InfrastructureError, MissingExtraError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import FailureKind, Limits, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.pool import WorkerPoolRunner, open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

try:
    import ray
except ModuleNotFoundError:
    ray = None

needs_ray = pytest.mark.skipif(ray is None, reason="Ray is not installed: pip install 'openhands_rl_plugin[ray]'")
cluster = [needs_ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileTrajectoryStorage]:
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        yield storage


@pytest.fixture(scope="module", autouse=True)
def no_cluster_is_left() -> Iterator[None]:
    yield
    if ray is not None:
        ray.shutdown()


def settings_for(model: str, shop: str, **more: object) -> RLSettings:
    host, port = shop.rsplit(":", 1)
    serving = ServingSettings(base_url=model, model="m", request_timeout=20.0)
    given = {"serving": serving, "env_server_base": host, "env_port": int(port), "max_workers": 8, "executor": "ray"}
    return RLSettings.model_validate({**given, **more})


def shopping(number: int) -> Task:
    replies = [{"text": "Thought: go on\nAction: search[shoes]"}]
    return Task(
        id=f"shop-{number}",
        environment="webshop",
        data={"idx": number},
        instruction=script(replies),
        limits=Limits(max_turns=3),
    )


async def everything(storage: FileTrajectoryStorage) -> list[Trajectory]:
    return [found async for found, _ in storage.find(TrajectoryFilter(finished=None))]


@pytest.mark.usefixtures("shop")
class TestCluster:
    pytestmark = cluster

    async def test_actors_play_into_the_same_storage(self, shop: str, storage: FileTrajectoryStorage) -> None:
        with instant_model() as model:
            plan = RolloutPlan(run_id="run", tasks=tuple(map(shopping, range(6))), samples_per_task=2)
            async with open_runner(settings_for(model, shop), workers=2, storage=storage) as pool:
                trajectories = await roll_out(plan, pool, storage)
                await pool.close()
        assert {trajectory.stop for trajectory in trajectories} == {StopReason.MAX_TURNS}
        assert {len(list(trajectory.sampled())) for trajectory in trajectories} == {3}
        stored = await everything(storage)
        assert sorted(stored, key=lambda found: found.id) == sorted(trajectories, key=lambda found: found.id)

    async def test_an_actor_that_dies_is_replaced_and_its_episodes_are_retried(
        self, shop: str, storage: FileTrajectoryStorage
    ) -> None:
        with instant_model(delay=0.5) as model:
            plan, options = RolloutPlan(run_id="run", tasks=tuple(map(shopping, range(4)))), HostOptions(sessions=4)
            async with open_runner(settings_for(model, shop), options, workers=1, storage=storage) as pool:
                playing = asyncio.create_task(roll_out(plan, pool, storage))
                async with asyncio.timeout(200):
                    while not any(list(found.sampled()) for found in await everything(storage)):
                        await asyncio.sleep(0.05)
                assert isinstance(pool, WorkerPoolRunner)
                worker = pool._workers[0]
                worker.kill()
                trajectories = await playing
        assert [trajectory.failure for trajectory in trajectories] == [None] * 4
        lost = [found for found in await everything(storage) if found.failure is not None]
        assert lost and {found.failure.kind for found in lost if found.failure} == {FailureKind.INFRASTRUCTURE}
        assert "a Ray actor ended" in str(lost[0].failure)


@needs_ray
@pytest.mark.slow
async def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()  # an earlier test may have started a cluster, and that would be used
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(InfrastructureError, match="the Ray cluster at nonsense cannot be used"):
        async with open_runner(RLSettings(executor="ray"), workers=1):
            pass


@pytest.mark.skipif(ray is not None, reason="Ray is installed")
async def test_without_ray_the_error_names_the_remedy() -> None:
    with pytest.raises(MissingExtraError, match=r"openhands_rl_plugin\[ray\]"):
        async with open_runner(RLSettings(executor="ray"), workers=1):
            pass


async def test_processes_are_the_default() -> None:
    async with open_runner(RLSettings(), workers=1) as pool:
        assert type(pool) is WorkerPoolRunner
