"""Episodes that nobody drives: stored as they run, once, whatever ends them. Only one test needs OpenHands."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import pytest
from openhands.controller.state.state import State
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import run_controller
from openhands.core.schema import AgentState
from openhands.events.action import MessageAction
from scripted_model import call, reply, serve

from openhands_rl_plugin import FileTrajectoryStorage, RLSettings, Trajectory
from openhands_rl_plugin.config.rl import SamplingSettings, ServingSettings
from openhands_rl_plugin.core.judgements import asked_in_common
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.sessions import HostOptions, standalone_episode
from openhands_rl_plugin.hosts.v0.agent import controller_end
from openhands_rl_plugin.hosts.v0.controller_session import controller_config

pytestmark = pytest.mark.contract


async def stored(folder) -> list[Trajectory]:
    async with FileTrajectoryStorage(folder) as storage:
        found = [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(finished=None))]
        return sorted(found, key=lambda each: each.times.started)


def test_a_task_follows_from_its_text_and_its_folder(tmp_path):
    def task(instruction, folder):
        given = {"session": uuid.uuid4().hex, "base_model": "m", "environment_mode": False, "workspace": folder}
        return standalone_episode(RLSettings(), instruction=instruction, **given).request.task

    asked = [("Do it.", tmp_path), ("Do that.", tmp_path), ("Do it.", tmp_path / "other")]
    assert all(task(*each) == task(*each) for each in asked)
    assert len({task(*each).id for each in asked}) == len({asked_in_common(task(*each)) for each in asked}) == 3


@pytest.mark.parametrize("environment_mode", [True, False])
def test_a_seed_makes_a_run_repeatable_and_no_seed_does_not(environment_mode):
    def seed(sampling: SamplingSettings, instruction: str = "Do it.") -> int | None:
        return standalone_episode(
            RLSettings(sampling=sampling),
            session=uuid.uuid4().hex,
            instruction=instruction,
            base_model="m",
            environment_mode=environment_mode,
        ).request.seed

    seven = SamplingSettings(seed=7)
    assert seed(seven) == seed(seven)
    assert len({seed(seven), seed(seven, "Do that."), seed(SamplingSettings(seed=8))}) == 3
    assert seed(SamplingSettings()) != seed(SamplingSettings())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.shows("kept after a killed process")
async def test_a_killed_openhands_leaves_every_answered_call(tmp_path):
    from test_agent_main import PLAIN, start

    with serve() as server:
        server.script("m", [reply(None, call("execute_bash", {"command": f"echo {turn}"})) for turn in range(50)])
        server.delay = 0.2
        process = start(tmp_path, server, "m", PLAIN.replace("max_turns = 9", "max_turns = 50"))
        try:
            deadline = time.monotonic() + 240
            while len(server.requests["m"]) < 4:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
                await asyncio.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        asked = len(server.requests["m"])
    (trajectory,) = await stored(tmp_path / "trajectories")
    assert trajectory.stop is StopReason.UNFINISHED
    answers = list(trajectory.sampled())
    # The request after an answer is sent when the answer is stored, and the last request may have been answered.
    assert len(answers) in (asked - 1, asked)
    assert [answer.message.tool_calls[0].arguments for answer in answers[:3]] == [
        '{"command": "echo 0"}',
        '{"command": "echo 1"}',
        '{"command": "echo 2"}',
    ]
    observations = [message.content or "" for message in trajectory.messages() if message.role == "tool"]
    assert [text.split()[0] for text in observations[:2]] == ["0", "1"]
    async with FileTrajectoryStorage(tmp_path / "trajectories") as storage:
        assert await storage.drop([trajectory.id]) == 1
    assert await stored(tmp_path / "trajectories") == []


@pytest.mark.parametrize(
    ("state", "error", "stop", "kind"),
    [
        (AgentState.ERROR, "RuntimeError: Agent reached maximum iteration.", StopReason.MAX_TURNS, None),
        (AgentState.ERROR, "AgentStuckInLoopError: Agent got stuck in a loop", StopReason.TRUNCATED, None),
        (AgentState.ERROR, "RuntimeError: Agent reached maximum budget", StopReason.TRUNCATED, None),
        (AgentState.ERROR, "STATUS$ERROR_RUNTIME_DISCONNECTED", None, FailureKind.INFRASTRUCTURE),
        (AgentState.STOPPED, "", None, FailureKind.INFRASTRUCTURE),
        (AgentState.AWAITING_USER_INPUT, "", StopReason.NO_ACTION, None),
    ],
)
def test_why_a_controller_stopped(state, error, stop, kind):
    found, failure = controller_end(State(agent_state=state, last_error=error))
    assert found is stop
    assert (failure and failure.kind) is kind


def config_for(url: str, folder: Path, rl: dict) -> OpenHandsConfig:
    settings = RLSettings(serving=ServingSettings(base_url=url, model="resumed"))
    config = controller_config(settings, HostOptions(environment_mode=False))
    config.file_store, config.file_store_path = "local", str(folder / "sessions")
    rl = {**rl, "workspace": {"isolation": "none"}}
    config.extended = ExtendedConfig({"rl": {**rl, "storage": {"path": str(folder / "store")}}})
    return config


def send(config: OpenHandsConfig, text: str) -> None:
    message = MessageAction(content=text)
    asyncio.run(
        run_controller(
            config=config, initial_user_action=message, sid="one-session", fake_user_response_fn=lambda state: "/exit"
        )
    )


@pytest.mark.shows("resumed conversations")
def test_a_named_session_goes_on_in_a_new_episode_with_its_history(tmp_path: Path) -> None:
    with serve() as server:
        server.script("resumed", [reply("Which one?"), reply(None, call("finish", {"message": "Done."}))])
        send(config_for(server.url, tmp_path, {}), "Do it.")
        send(config_for(server.url, tmp_path, {"rollout_strategy": "BestOfN", "strategy": {"n": 1}}), "That one.")
    one, two = asyncio.run(stored(tmp_path / "store"))
    assert [one.stop, two.stop] == [StopReason.NO_ACTION, StopReason.TERMINATED]
    assert one.group_id == two.group_id and two.strategy.name == "BestOfN"
    texts = [(message.role, message.content or "") for message in two.messages()]
    assert ("assistant", "Which one?") in texts and any(role == "user" and "That one." in text for role, text in texts)
    assert [node.sampled for node in two.nodes] == [False] * (len(two.nodes) - 1) + [True]
