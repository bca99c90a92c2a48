"""Episodes that nobody drives: stored once, whatever ends them. OpenHands itself is not needed for that."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from openhands_rl_plugin import FileTrajectoryStorage, Message, RLSettings, Trajectory
from openhands_rl_plugin.errors import ConfigError
from openhands_rl_plugin.hosts.v0.episode import ControllerEpisode, bind_episode, controller_end, current_episode
from openhands_rl_plugin.hosts.v0.standalone import StandaloneKeeper, standalone_episode
from openhands_rl_plugin.settings import StorageSettings
from openhands_rl_plugin.types import FailureKind, SamplingParams, StopReason

LEAVES_EARLY = """
import sys
from openhands_rl_plugin import Message, RLSettings
from openhands_rl_plugin.hosts.v0.standalone import StandaloneKeeper, standalone_episode

settings = RLSettings.model_validate({"storage": {"path": sys.argv[1]}})
episode = standalone_episode(
    settings, session="s", instruction="Do it.", base_model="m", environment_mode=False
)
keeper = StandaloneKeeper(episode)
episode.tree.head = episode.tree.append(Message(role="user", content="Do it."))
sys.exit("the host gave up")
"""


def episode_in(folder) -> ControllerEpisode:
    settings = RLSettings(storage=StorageSettings(path=str(folder)))
    episode = standalone_episode(
        settings, session="session-1", instruction="Do it.", base_model="m", environment_mode=False
    )
    episode.tree.head = episode.tree.append(Message(role="user", content="Do it."))
    return episode


async def stored(folder) -> list[Trajectory]:
    async with FileTrajectoryStorage(folder) as storage:
        return [trajectory async for trajectory, _ in storage.find()]


async def test_stored_once_however_often_the_end_is_announced(tmp_path):
    keeper = StandaloneKeeper(episode_in(tmp_path))
    ends = [threading.Thread(target=keeper.keep, args=(StopReason.TRUNCATED,)) for _ in range(8)]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    (trajectory,) = await stored(tmp_path)
    assert trajectory.stop is StopReason.TRUNCATED
    assert (trajectory.task.id, trajectory.task.instruction) == ("session-1", "Do it.")


async def test_two_runs_of_one_named_session_are_two_trajectories(tmp_path):
    for _ in range(2):
        StandaloneKeeper(episode_in(tmp_path)).keep()
    one, other = await stored(tmp_path)
    assert one.id != other.id


async def test_stored_when_the_process_ends_first(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES_EARLY, str(tmp_path)], capture_output=True, text=True)
    assert done.stderr.strip() == "the host gave up"
    (trajectory,) = await stored(tmp_path)
    assert trajectory.stop is StopReason.NO_ACTION
    assert [node.message.content for node in trajectory.nodes] == ["Do it."]


def test_an_unknown_strategy_is_named():
    with pytest.raises(ConfigError, match="StandardReAct"):
        RLSettings(rollout_strategy="StandardReakt")


@pytest.mark.parametrize(
    ("state", "error", "stop", "kind"),
    [
        ("error", "RuntimeError: Agent reached maximum iteration. Current iteration: 3", StopReason.MAX_TURNS, None),
        ("error", "AgentStuckInLoopError: Agent got stuck in a loop", StopReason.TRUNCATED, None),
        ("error", "RuntimeError: Agent reached maximum budget for conversation.", StopReason.TRUNCATED, None),
        ("error", "STATUS$ERROR_RUNTIME_DISCONNECTED", StopReason.ERROR, FailureKind.INFRASTRUCTURE),
        ("stopped", "", StopReason.ERROR, FailureKind.INFRASTRUCTURE),
    ],
)
def test_why_a_controller_stopped(state, error, stop, kind):
    found, failure = controller_end(state, error)
    assert found is stop
    assert (failure and failure.kind) is kind


def test_binding_lasts_as_long_as_its_block(tmp_path):
    episode = episode_in(tmp_path)
    assert current_episode() is None
    with bind_episode(episode):
        assert current_episode() is episode
    assert current_episode() is None


def test_wishes_of_the_strategy_come_before_those_of_the_request_and_the_settings(tmp_path):
    episode = episode_in(tmp_path)
    episode.sampling = episode.sampling.model_copy(update={"temperature": 0.5})
    sampling = episode.sampling_for(SamplingParams(top_p=0.5, max_tokens=7), call=1)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.5, 7)
    assert episode.sampling_for(None, call=1).max_tokens == 512
    assert episode.sampling_for(None, call=1).seed != episode.sampling_for(None, call=2).seed
    assert episode.sampling_for(None, call=2).seed == episode.sampling_for(None, call=2).seed
