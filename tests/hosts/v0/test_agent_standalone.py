"""Episodes that nobody drives: stored as they are played, once, whatever ends them. Only one test needs OpenHands."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import uuid

import pytest
from openhands.controller.state.state import State
from openhands.core.schema import AgentState
from scripted_model import call, says, serve

from openhands_rl_plugin import FileTrajectoryStorage, Message, RLSettings, Trajectory
from openhands_rl_plugin.apps.rl_agent import task_id_of
from openhands_rl_plugin.config.rl import SamplingSettings, StorageSettings
from openhands_rl_plugin.core.concurrency import background, bound
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import asked_in_common
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import FailureKind, SamplingParams, StopReason
from openhands_rl_plugin.hosts.shared.sessions import (
    TASK_INDEX_VARIABLE,
    StandaloneRun,
    own_request,
    standalone_episode,
    workspace_task,
)
from openhands_rl_plugin.hosts.v0.agent import controller_end
from openhands_rl_plugin.session.session import Session, session_here

pytestmark = pytest.mark.contract

LEAVES_EARLY = """
import sys
from openhands_rl_plugin import Message, RLSettings
from openhands_rl_plugin.hosts.shared.sessions import StandaloneRun, standalone_episode

settings = RLSettings.model_validate({"storage": {"path": sys.argv[1]}})
episode = standalone_episode(
    settings, session="s", instruction="Do it.", base_model="m", environment_mode=False
)
keeper = StandaloneRun(episode)
episode.tree.head = episode.tree.append(Message(role="user", content="Do it."))
sys.exit("the host gave up")
"""


def episode_in(folder) -> Session:
    settings = RLSettings(storage=StorageSettings(path=str(folder)))
    episode = standalone_episode(
        settings, session="session-1", instruction="Do it.", base_model="m", environment_mode=False
    )
    episode.tree.head = episode.tree.append(Message(role="user", content="Do it."))
    return episode


async def stored(folder) -> list[Trajectory]:
    async with FileTrajectoryStorage(folder) as storage:
        return [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(finished=None))]


async def test_stored_once_however_often_the_end_is_announced(tmp_path):
    keeper = StandaloneRun(episode_in(tmp_path))
    ends = [threading.Thread(target=keeper.end, args=(StopReason.TRUNCATED,)) for _ in range(8)]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    (trajectory,) = await stored(tmp_path)
    assert trajectory.stop is StopReason.TRUNCATED
    assert trajectory.task.id.startswith("do-it-") and trajectory.task.instruction == "Do it."


def test_a_task_follows_from_its_text_and_its_folder(tmp_path):
    def task(instruction, folder):
        given = {"session": uuid.uuid4().hex, "base_model": "m", "environment_mode": False, "workspace": folder}
        return standalone_episode(RLSettings(), instruction=instruction, **given).request.task

    asked = [("Do it.", tmp_path), ("Do that.", tmp_path), ("Do it.", tmp_path / "other")]
    assert all(task(*each) == task(*each) for each in asked)
    assert len({task(*each).id for each in asked}) == len({asked_in_common(task(*each)) for each in asked}) == 3


def test_attempts_of_one_run_are_samples_of_a_group_with_seeds_of_their_own(tmp_path):
    settings, task = RLSettings(sampling=SamplingSettings(seed=7)), workspace_task("Do it.", str(tmp_path))
    one, two = (own_request(settings, task, "run-1", "run-1", sample=sample) for sample in (0, 1))
    assert (one.run_id, one.group_id, one.task) == (two.run_id, two.group_id, two.task) and one.seed != two.seed
    given = {"session": "s", "instruction": "Do it.", "base_model": "m", "environment_mode": False}
    first = standalone_episode(settings, workspace=tmp_path, **given).request
    assert (first.seed, first.task, first.group_id) == (one.seed, task, "s")


async def test_two_runs_of_one_named_session_are_two_trajectories(tmp_path):
    for _ in range(2):
        StandaloneRun(episode_in(tmp_path)).end()
    one, other = await stored(tmp_path)
    assert one.id != other.id


async def test_stored_when_the_process_ends_first(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES_EARLY, str(tmp_path)], capture_output=True, text=True)
    assert done.stderr.strip() == "the host gave up"
    (trajectory,) = await stored(tmp_path)
    assert trajectory.stop is StopReason.NO_ACTION
    assert [node.message.content for node in trajectory.nodes] == ["Do it."]


async def test_stored_while_it_is_played(tmp_path):
    episode = episode_in(tmp_path)
    keeper = StandaloneRun(episode)
    background().wait_for(episode.keep_up())
    (unfinished,) = await stored(tmp_path)
    assert unfinished.stop is StopReason.UNFINISHED
    assert [node.message.content for node in unfinished.nodes] == ["Do it."]
    keeper.end(StopReason.TERMINATED)
    (finished,) = await stored(tmp_path)
    assert (finished.id, finished.stop) == (unfinished.id, StopReason.TERMINATED)
    episode.tree.head = episode.tree.append(Message(role="user", content="Too late."))
    background().wait_for(episode.keep_up())
    assert await stored(tmp_path) == [finished]


def test_a_storage_that_fails_is_not_forgotten(tmp_path):
    (tmp_path / "file").write_text("no folder")
    episode = episode_in(tmp_path / "file")
    StandaloneRun(episode)
    with pytest.raises(StorageError):
        background().wait_for(episode.keep_up())
    assert isinstance(episode.error, StorageError)
    episode.tree.nodes.clear()  # so that nothing is tried again when the tests end


def test_an_episode_of_an_environment_has_the_environments_task(monkeypatch):
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "12")
    episode = standalone_episode(
        RLSettings(env_name="webshop"), session="s", instruction="Buy it.", base_model="m", environment_mode=True
    )
    task = episode.request.task
    assert (task.environment, task.data, task.instruction) == ("webshop", {"idx": 12}, "Buy it.")
    assert task.id == task_id_of("webshop", 12), "agent.train(task_id=12) finds what openhands.core.main has played"


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
        server.script("m", [says(None, call("execute_bash", {"command": f"echo {turn}"})) for turn in range(50)])
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


def test_binding_lasts_as_long_as_its_block(tmp_path):
    episode = episode_in(tmp_path)
    assert session_here.get() is None
    with bound(session_here, episode):
        assert session_here.get() is episode
    assert session_here.get() is None


def test_wishes_of_the_strategy_come_before_those_of_the_request_and_the_settings(tmp_path):
    episode = episode_in(tmp_path)
    episode.sampling = episode.sampling.model_copy(update={"temperature": 0.5})
    sampling = episode.sampling_for(SamplingParams(top_p=0.5, max_tokens=7), number=1)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.5, 7)
    assert episode.sampling_for(None, number=1).max_tokens == 512
    assert episode.sampling_for(None, number=1).seed != episode.sampling_for(None, number=2).seed
    assert episode.sampling_for(None, number=2).seed == episode.sampling_for(None, number=2).seed
