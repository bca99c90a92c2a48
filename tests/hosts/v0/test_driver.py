"""Real OpenHands sessions, many in one process, with real environments and sandboxes and an instant model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.pool import HostRunner, ProcessWorker, WorkerPoolRunner, local_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.rollout.episode import stored_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

IN_A_WORKSPACE = HostOptions(environment_mode=False)


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with instant_model() as url:
        yield url


def settings_for(model: str, shop: str = "http://127.0.0.1:1", **more) -> RLSettings:
    host, port = shop.rsplit(":", 1)
    serving = ServingSettings(base_url=model, model="m", request_timeout=20.0)
    return RLSettings(serving=serving, env_server_base=host, env_port=int(port), **{"max_workers": 16, **more})


@asynccontextmanager
async def controller(
    settings: RLSettings, options: HostOptions | None = None, storage: TrajectoryStorage | None = None
) -> AsyncIterator[HostRunner]:
    runner = local_runner(settings, options, storage=storage)
    yield runner
    await runner.close()


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileTrajectoryStorage]:
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        yield storage


async def everything(storage: FileTrajectoryStorage) -> list[Trajectory]:
    return [found async for found, _ in storage.find(TrajectoryFilter(finished=None))]


async def until(condition: Callable[[Trajectory], bool], storage: FileTrajectoryStorage, id: str) -> Trajectory:
    """What is stored of a running episode, as soon as it is there."""
    async with asyncio.timeout(90):
        while (found := await stored_episode(storage, id)) is None or not condition(found):
            await asyncio.sleep(0.02)
    return found


def shopping(number: int, actions: list[str], **limits) -> EpisodeRequest:
    replies = [{"text": f"Thought: go on\nAction: {action}"} for action in actions]
    return EpisodeRequest(
        task=Task(
            id=f"shop-{number}",
            environment="webshop",
            data={"idx": number},
            instruction=script(replies),
            limits=Limits(**{"max_turns": 5, **limits}),
        ),
        run_id="run",
        group_id=f"group-{number}",
    )


def working(number: int, commands: list[str], *, finish: bool = True, **limits) -> EpisodeRequest:
    replies = [{"bash": command} for command in commands] + [{"finish": "done"}] * finish
    task = Task(
        id=f"work-{number}",
        environment="workspace",
        instruction=script(replies),
        limits=Limits(**{"max_turns": len(replies) + 5, **limits}),
    )
    return EpisodeRequest(task=task, run_id="run", group_id=f"group-{number}")


def tool_answers(trajectory: Trajectory) -> list[str]:
    return [message.content or "" for message in trajectory.messages() if message.role == "tool"]


def session_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_run_queue_loop" in thread.name]


@pytest.mark.parametrize(("sessions", "turns"), [(4, 3), pytest.param(16, 20, marks=pytest.mark.slow)])
@pytest.mark.shows("many sessions in one process")
@pytest.mark.shows("sandboxed workspace")
async def test_no_observation_is_lost_and_sessions_do_not_meet(
    model: str, storage: FileTrajectoryStorage, sessions: int, turns: int
):
    def commands(number: int) -> list[str]:
        return [f"echo {number}:{turn}; echo {number} >> mine; sort -u mine" for turn in range(turns)]

    before = session_threads()
    async with controller(settings_for(model, max_obs_length=4096), IN_A_WORKSPACE, storage) as runner:
        ended = await asyncio.gather(*(runner.run(working(number, commands(number))) for number in range(sessions)))
    assert {trajectory.stop for trajectory in ended} == {StopReason.TERMINATED}
    assert sorted(await everything(storage), key=lambda found: found.id) == sorted(ended, key=lambda found: found.id)
    # The answer to the last command is the prompt of the turn that finishes.
    right = [
        answer.startswith(f"{number}:{turn}\n{number}\n")
        for number, trajectory in enumerate(ended)
        for turn, answer in enumerate(tool_answers(trajectory))
    ]
    assert (len(right), sum(right)) == (sessions * turns, sessions * turns)
    assert not [thread for thread in session_threads() if thread not in before], "sessions leave no threads"


@pytest.mark.shows("environments rolled out by a runner")
async def test_episodes_in_an_environment(model: str, shop: str):
    async with controller(settings_for(model, shop)) as runner:
        limited, ended = await asyncio.gather(
            runner.run(shopping(1, ["search[shoes]"])),
            runner.run(shopping(2, ["search[shoes]", "click[Next >]", "click[< Prev]", "click[Back to Search]"])),
        )
    assert limited.stop is ended.stop is StopReason.MAX_TURNS and limited.failure is None
    assert limited.evidence["steps"] == 5 and limited.evidence["done"] is False
    sampled = list(limited.sampled())
    assert len(sampled) == 5 and [node.tokens.extends for node in sampled if node.tokens] == [False] + [True] * 4
    assert all(node.reward == 0.0 for node in sampled)
    assert limited.nodes[0].message.role == "system" and "SCRIPT" in (limited.nodes[0].message.content or "")


async def test_a_command_that_outlasts_the_episode_is_ended(model: str):
    marker = f"95{os.getpid()}"
    async with controller(settings_for(model), IN_A_WORKSPACE) as runner:
        trajectory = await runner.run(working(1, [f"sleep {marker}"], timeout=1.0))
    assert trajectory.stop is StopReason.TIMEOUT
    assert not subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True).stdout


async def test_an_episode_that_was_left_unfinished_is_rolled_out_anew(model: str, storage: FileTrajectoryStorage):
    request = working(1, ["echo one", "echo two"], max_turns=2)
    with instant_model(delay=0.2) as slow:
        async with controller(settings_for(slow), IN_A_WORKSPACE, storage) as runner:
            playing = asyncio.create_task(runner.run(request))
            unfinished = await until(lambda found: len(list(found.sampled())) == 1, storage, trajectory_id(request))
            playing.cancel()
            await asyncio.wait([playing])
    assert [found.stop for found in await everything(storage)] == [unfinished.stop] == [StopReason.UNFINISHED]
    async with controller(settings_for(model), IN_A_WORKSPACE, storage) as runner:
        ended = await runner.run(request)
    assert ended.stop is StopReason.MAX_TURNS and len(list(ended.sampled())) == 2
    assert await everything(storage) == [ended]


@pytest.mark.slow
class TestWorkerPool:
    @pytest.mark.shows("worker processes")
    async def test_a_pool(self, model: str, shop: str, storage: FileTrajectoryStorage):
        pool = WorkerPoolRunner(settings_for(model, shop), workers=2, storage=storage)
        ended = await asyncio.gather(*(pool.run(shopping(n, ["search[shoes]"])) for n in range(32)))
        assert {trajectory.stop for trajectory in ended} == {StopReason.MAX_TURNS}
        assert {trajectory.task.id for trajectory in ended} == {f"shop-{n}" for n in range(32)}
        await pool.close()
        stored = await everything(storage)
        assert sorted(stored, key=lambda found: found.id) == sorted(ended, key=lambda found: found.id)

    async def test_what_a_dead_worker_has_sampled_is_kept(self, shop: str, storage: FileTrajectoryStorage):
        request = shopping(0, ["search[shoes]"])
        with instant_model(delay=0.3) as model:
            pool = WorkerPoolRunner(settings_for(model, shop), HostOptions(sessions=4), workers=1, storage=storage)
            playing = asyncio.create_task(pool.run(request))
            kept = await until(lambda found: len(list(found.sampled())) == 2, storage, trajectory_id(request))
            worker = pool._workers[0]
            worker.kill()
            failed = await playing
            replaced = await pool.run(request.model_copy(update={"attempt": 1}))
            await pool.close()
        assert failed.failure is not None and "signal 9" in failed.failure.message
        assert len(list(failed.sampled())) == failed.usage.calls >= 2
        assert failed.times.started == kept.times.started
        assert replaced.stop is StopReason.MAX_TURNS
        assert await everything(storage) == [failed, replaced]

    async def test_giving_up_a_pool_ends_its_workers(self, shop: str):
        with instant_model(delay=5.0) as model:
            pool = WorkerPoolRunner(settings_for(model, shop), workers=1)
            playing = asyncio.create_task(pool.run(shopping(1, ["search[x]"])))
            await asyncio.sleep(1.0)
            worker = pool._workers[0]
            await pool.close()
            assert isinstance(worker, ProcessWorker) and worker.process.wait(1) in (0, -9)
            assert (await playing).failure is not None
