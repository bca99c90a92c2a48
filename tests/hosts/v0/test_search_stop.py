"""A search that is ended from outside, in sessions that ``openhands.core.main`` plays and in those of a runner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import auto_continue_response, run_controller
from openhands.core.schema import AgentState
from openhands.core.setup import create_runtime
from openhands.events import EventSource
from openhands.events.action import ChangeAgentStateAction, MessageAction
from openhands.runtime.base import Runtime
from openhands.utils.async_utils import call_async_from_sync
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin import FileTrajectoryStorage
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Limits, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner, controller_config

pytestmark = needs_bubblewrap

SLEEP = f"sleep 7{os.getpid()}"
ENDLESS = {
    "rollout_strategy": "MCTS",
    "strategy": {"num_simulations": 10_000, "value": "model", "parallel": 4},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def left_behind() -> set[Path]:
    """All but what a process keeps for all of its sandboxes."""
    found = Path(tempfile.gettempdir()).glob("openhands-rl-of-*/*")
    return {folder for folder in found if not folder.name.startswith("openhands-rl-etc-")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = left_behind()
    yield
    assert left_behind() == before
    assert not running(SLEEP)


def running(command: str) -> bool:
    return bool(subprocess.run(["pgrep", "-f", f"^{command}"], capture_output=True).stdout)


def sleeper(body: dict[str, Any]) -> dict[str, Any]:
    """Every action hangs, in whichever branch it is tried."""
    return says(None, call("execute_bash", {"command": SLEEP, "timeout": 600}, f"id{body['seed']}"))


def settings_for(server: ScriptedModel, model: str, **more: Any) -> RLSettings:
    server.policies[model] = sleeper
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    return RLSettings(serving=serving, **{**ENDLESS, **more})


def until(condition: Callable[[], bool], patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_the_time_limit_of_an_episode_ends_its_search(server: ScriptedModel):
    runner = ControllerRunner(settings_for(server, "limited"), HostOptions(environment_mode=False))
    task = Task(id="t", environment="workspace", instruction="Wait.", limits=Limits(timeout=2.0))
    started = time.monotonic()
    trajectory = await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g"))
    assert trajectory.stop is StopReason.TIMEOUT and trajectory.failure is None
    assert [node for node in trajectory.nodes if node.sampled] and trajectory.usage.steps == 0
    assert time.monotonic() - started < 10
    await runner.close()


def standalone(server: ScriptedModel, folder: Path, model: str, meddle: Callable[[Runtime], None]) -> list[Trajectory]:
    """What is stored of a session as under ``python -m openhands.core.main``, with ``meddle`` called in mid-search."""
    settings = settings_for(server, model)
    given = settings.model_dump(exclude={"serving"}, exclude_unset=True)
    config = controller_config(settings, HostOptions(environment_mode=False))
    config.extended = ExtendedConfig({"rl": {**given, "storage": {"path": str(folder / "store")}}})

    async def play() -> None:
        runtime = create_runtime(config)
        call_async_from_sync(runtime.connect)
        meddler = threading.Thread(target=lambda: (until(lambda: running(SLEEP)), meddle(runtime)))
        meddler.start()
        await run_controller(
            config=config,
            initial_user_action=MessageAction(content="Wait."),
            runtime=runtime,
            fake_user_response_fn=auto_continue_response,
        )
        meddler.join()
        runtime.event_stream.close()
        runtime.close()

    async def read() -> list[Trajectory]:
        async with FileTrajectoryStorage(folder / "store") as storage:
            return [trajectory async for trajectory, _ in storage.find()]

    asyncio.run(play())
    return asyncio.run(read())


def stop_by_event(runtime: Runtime) -> None:
    runtime.event_stream.add_event(ChangeAgentStateAction(AgentState.STOPPED), EventSource.USER)


def stop_by_signal(runtime: Runtime) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("stop", [stop_by_event, stop_by_signal])
def test_the_user_stops_the_agent_in_mid_search(server: ScriptedModel, tmp_path: Path, stop: Callable[[Runtime], None]):
    stopped: list[float] = []

    def meddle(runtime: Runtime) -> None:
        stopped.append(time.monotonic())
        stop(runtime)

    (trajectory,) = standalone(server, tmp_path, stop.__name__, meddle)
    # OpenHands itself looks for the end once a second, and sleeps while it cleans up.
    assert time.monotonic() - stopped[0] < 6
    assert trajectory.stop is StopReason.ERROR and trajectory.failure is not None
    assert trajectory.failure.kind is FailureKind.INFRASTRUCTURE and "stopped" in trajectory.failure.message
    assert [node for node in trajectory.nodes if node.sampled] and trajectory.usage.steps == 0
    assert trajectory.strategy.name == "MCTS" and trajectory.strategy.options["parallel"] == 4
    assert trajectory.evidence["changed_files"] == {}
