"""A condensed session of OpenHands' real controller: nothing that was sampled is lost, and summaries are themselves."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import run_controller
from openhands.events.action import MessageAction
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import (
    CONDENSATION,
    TURN,
    EpisodeRequest,
    Limits,
    Sample,
    StopReason,
    Task,
    Trajectory,
    kind_of,
)
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner, controller_config
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.data.batch import off_policy_sampling, pack, samples_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

CONDENSER = {"type": "llm", "max_size": 10, "keep_first": 3}
TURNS = 12
ROOT = Path(__file__).parents[3]
V1 = Path(os.environ.get("OPENHANDS_RL_SDK_PYTHON") or ROOT / ".venv-v1" / "bin" / "python")
HELPERS = ROOT / "tests" / "helpers" / "servers"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


async def play(server: ScriptedModel, model: str, **options) -> Trajectory:
    """Twelve thoughts, and a summary wherever the condenser asks for one."""
    said = iter(range(1000))

    def policy(body: dict) -> dict:
        number = next(said)
        if not body.get("tools"):
            return says(f"summary {number}")
        return says(f"turn {number}", call("think", {"thought": f"hm {number}"}, f"call-{number}"))

    server.policies[model] = policy
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    settings = RLSettings.model_validate({"serving": serving.model_dump(), "workspace": {"isolation": "none"}})
    runner = ControllerRunner(settings, HostOptions(**{"environment_mode": False, "condenser": CONDENSER, **options}))
    task = Task(id="t", environment="workspace", instruction="Think.", limits=Limits(max_turns=TURNS))
    try:
        return await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g"))
    finally:
        await runner.close()


def trained(samples: list[Sample]) -> int:
    return sum(sum(sample.mask) for sample in samples)


def sampled(trajectory: Trajectory, kind: str) -> int:
    nodes = [node for node in trajectory.nodes if node.sampled and kind_of(node) == kind]
    assert all(node.tokens is not None for node in nodes)
    return sum(len(node.tokens.sampled_ids) for node in nodes if node.tokens is not None)


@pytest.mark.parametrize("agent", ["RLAgent", "CodeActAgent"])
@pytest.mark.shows("condensers, summaries recorded")
async def test_all_acted_sampled_tokens_of_a_condensed_session_are_trained(server: ScriptedModel, agent: str) -> None:
    episode = await play(server, f"condensed-{agent}", agent=agent)
    assert episode.failure is None and not off_policy_sampling(episode)
    assert len(episode.ends()) > 2
    last = trained(samples_of(episode, leaf=episode.head))
    assert trained(samples_of(episode)) == sampled(episode, TURN) > 2 * last
    summaries = [node for node in episode.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert len(summaries) == len(episode.ends()) - 1
    assert all((node.message.content or "").startswith("summary") for node in summaries)
    # Of an agent of OpenHands a condensation is an iteration, too.
    assert len(episode.acted()) == TURNS - (0 if agent == "RLAgent" else len(summaries))
    assert episode.usage.calls == len(server.requests[f"condensed-{agent}"])


@pytest.mark.shows("condensation on request (/compact)")
def test_a_summary_that_the_model_asks_for(server: ScriptedModel, tmp_path: Path) -> None:
    """V0's way to ask for one is a tool, where the agent's settings offer it."""
    asked = [
        *(says(None, call("think", {"thought": "hm"}, f"call-{turn}")) for turn in range(4)),
        says("I forget.", call("request_condensation", {}, "call-4")),
        says("summary of it"),
        says(None, call("finish", {"message": "Done."}, "call-5")),
    ]
    answers = iter(asked)
    server.policies["requested"] = lambda body: next(answers)
    settings = RLSettings(serving=ServingSettings(base_url=server.url, model="requested"))
    condenser = {**CONDENSER, "max_size": 16, "keep_first": 1}
    options = HostOptions(environment_mode=False, condenser=condenser)
    config = controller_config(settings, options)
    config.agents["RLAgent"].enable_condensation_request = True
    config.extended = ExtendedConfig({"rl": {"workspace": {"isolation": "none"}, "storage": {"path": str(tmp_path)}}})
    asyncio.run(run_controller(config=config, initial_user_action=MessageAction(content="Think.")))

    async def read() -> list[Trajectory]:
        async with FileTrajectoryStorage(tmp_path) as storage:
            return [each async for each, _ in storage.find()]

    (episode,) = asyncio.run(read())
    summaries = [node for node in episode.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert [node.message.content for node in summaries] == ["summary of it"]
    assert episode.stop is StopReason.TERMINATED and len(episode.ends()) == 2
    assert episode.usage.calls == len(server.requests["requested"]) == len(asked)


async def test_a_condenser_that_openhands_does_not_know_is_refused(server: ScriptedModel) -> None:
    with pytest.raises(ConfigError, match=r"condenser .*Unknown condenser type: magic"):
        await play(server, "magic", condenser={"type": "magic"})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not V1.exists(), reason="OpenHands V1 is not installed beside: make test-v1")
async def test_episodes_of_v0_and_v1_are_in_one_store_and_one_batch(server: ScriptedModel, tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        await storage.add(await play(server, "both-v0"))
    said = iter(range(1000))

    def policy(body: dict) -> dict:
        number = next(said)
        if not body.get("tools"):
            return says(f"summary {number}")
        if number > TURNS:
            return says(None, call("finish", {"message": "done"}, f"call-{number}"))
        return says(f"turn {number}", call("think", {"thought": f"hm {number}"}, f"call-{number}"))

    server.policies["both-v1"] = policy
    (tmp_path / "work").mkdir()
    words = [str(V1), str(HELPERS / "v1_conversation.py"), server.url, "both-v1", str(tmp_path / "store")]
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OH_PERSISTENCE_DIR": str(tmp_path / "own")}
    ran = subprocess.run(
        [*words, str(tmp_path / "work")], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        episodes = [episode async for episode, _ in storage.find(TrajectoryFilter())]
    assert {episode.policy.base_model for episode in episodes} == {"both-v0", "both-v1"}
    assert all(len(episode.ends()) > 1 for episode in episodes)
    samples = [sample for episode in episodes for sample in samples_of(episode)]
    assert trained(samples) == sum(sampled(episode, TURN) for episode in episodes)
    assert trained(samples) == sum(trained(samples_of(episode)) for episode in episodes)
    [batch] = pack(samples, sum(len(sample.input_ids) for sample in samples))
    assert len(batch) == len(samples) and {sample.trajectory_id for sample in batch} == {each.id for each in episodes}
    group = [episode.model_copy(update={"group_id": "both"}) for episode in episodes]
    credited = credited_samples(group, [1.0, 0.0], TrainingSettings())
    assert trained(credited) == trained(samples)
    assert {sample.advantage > 0 for sample in credited} == {True, False}
