"""The friendly face, over a model that was taught to shop, the embedded shop and the embedded model server."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import torch
from shopper_model import write_shopper
from small_shop import BAD, GOAL, GOALS, GOOD, INSTRUCTION, ShopSession

from openhands_rl_plugin import RLAgent, RLAgentConfig
from openhands_rl_plugin.apps.rl_agent import EpisodeResult
from openhands_rl_plugin.core.concurrency import LoopThread
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, PublishError, RLError, TrainingError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import PolicyRef, Score, Trajectory
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads do not help a model this small, and they hurt where the processor is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shopper(tmp_path_factory.mktemp("models") / "shopper")


@pytest.fixture
def config(shop: str, tmp_path: Path) -> RLAgentConfig:
    return RLAgentConfig.model_validate(
        {
            "max_turns": 4,
            "max_response_length": 48,
            "react_format": False,
            "env_server_base": shop,
            "storage": {"path": str(tmp_path / "trajectories"), "durable": False},
            "serving": {"adapters_path": str(tmp_path / "adapters")},
            "training": {"dtype": "float32", "lora_rank": 8},
        }
    )


def changed(config: RLAgentConfig, **changes: object) -> RLAgentConfig:
    return RLAgentConfig.model_validate({**config.model_dump(), **changes})


def stored(config: RLAgentConfig, where: TrajectoryFilter | None = None) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    async def read() -> list[tuple[Trajectory, tuple[Score, ...]]]:
        async with FileTrajectoryStorage(config.storage.directory) as storage:
            return [found async for found in storage.find(where)]

    return asyncio.run(read())


def actions(episode: EpisodeResult) -> tuple[str, ...]:
    return tuple(message["value"] for message in episode["conversation"] if message["from"] == "gpt")


def mean_reward(episodes: Sequence[EpisodeResult]) -> float:
    return sum(episode["reward"] or 0.0 for episode in episodes) / len(episodes)


def test_a_run_reports_what_happened(model: Path, config: RLAgentConfig) -> None:
    with RLAgent(model=str(model), tokenizer=None, config=config) as agent:
        episodes = agent.run(task_description=INSTRUCTION, task_indices=[GOAL, 4], batch_size=2)
        assert agent.run(INSTRUCTION, task_indices=[]) == []
    assert [episode["task_id"] for episode in episodes] == ["webshop-1", "webshop-1", "webshop-4", "webshop-4"]
    first = episodes[0]
    assert {message["from"] for message in first["conversation"]} == {"human", "gpt"}
    assert all(message["loss"] is (True if message["from"] == "gpt" else None) for message in first["conversation"])
    assert f"Task: {INSTRUCTION}" in first["conversation"][0]["value"]
    assert actions(first) in (GOOD, BAD)
    assert (first["reward"], first["stop"], first["failure"]) == (0.75 * (actions(first) == GOOD), "terminated", None)
    assert first["text"].startswith("\nHuman: ") and f"\nAssistant: {GOOD[-1]}" in first["text"]
    assert json.loads(json.dumps(episodes)) == episodes
    kept = {trajectory.id: (trajectory, scores) for trajectory, scores in stored(config)}
    assert set(kept) == {episode["trajectory_id"] for episode in episodes}
    trajectory, scores = kept[first["trajectory_id"]]
    assert [score.reward for score in scores] == [first["reward"]]
    assert trajectory.task.data == {"idx": GOAL}
    assert trajectory.policy == PolicyRef(base_model=str(model.resolve()))
    assert all(node.tokens and node.tokens.logprobs for node in trajectory.sampled())


def test_parallel_episodes_do_not_share_a_world_and_a_seed_repeats_them(model: Path, config: RLAgentConfig) -> None:
    seeded = changed(config, sampling={"seed": 0})
    with RLAgent(model, config=seeded) as agent:
        episodes = agent.run(INSTRUCTION, task_indices=range(4), batch_size=2)
    with RLAgent(model, config=seeded) as agent:
        again = agent.run(INSTRUCTION, task_indices=range(4), batch_size=2)
    assert [episode["text"] for episode in again] == [episode["text"] for episode in episodes]
    assert len(episodes) == 8
    for at, episode in enumerate(episodes):
        session = ShopSession(GOALS[at // 2])
        human_turns = [message["value"] for message in episode["conversation"] if message["from"] == "human"]
        replayed = [session.observation, *(session.step(action).state for action in actions(episode))]
        assert human_turns[1:] == replayed


def test_training_reinforces_and_the_next_run_uses_it(model: Path, config: RLAgentConfig) -> None:
    with RLAgent(model, config=config) as agent:
        before = agent.run(INSTRUCTION, task_indices=[GOAL], batch_size=16)
        assert {episode["reward"] for episode in before} == {0.0, 0.75}
        report = agent.train(learning_rate=4e-3, num_epochs=3, batch_size=16)
        after = agent.run(INSTRUCTION, task_indices=[GOAL], batch_size=16)
        assert mean_reward(after) > mean_reward(before) + 0.1
        assert (report.algorithm, report.used, report.adapter.name) == ("reinforce++-baseline", 16, "policy-v000001")
        assert report.metrics["steps"] == report.adapter.step == 3
        assert agent.adapter == report.adapter
        again = agent.train(learning_rate=1e-4, num_epochs=1)
        assert (again.adapter.version, again.adapter.parent, again.used) == (2, "policy-v000001", 32)
        assert again.adapter.step > 3
        assert agent.policy.version == 2
    base = str(model.resolve())
    policies = {trajectory.id: trajectory.policy for trajectory, _ in stored(config)}
    assert {policies[episode["trajectory_id"]] for episode in before} == {PolicyRef(base_model=base)}
    assert {policies[episode["trajectory_id"]] for episode in after} == {
        PolicyRef(base_model=base, adapter="policy", version=1)
    }
    with RLAgent(model, config=config) as resumed:
        assert resumed.adapter is not None and resumed.adapter.name == "policy-v000002"


def test_what_is_trained_on_can_be_chosen(model: Path, config: RLAgentConfig, tmp_path: Path) -> None:
    with RLAgent(model, config=config) as agent:
        with pytest.raises(TrainingError, match=r"nothing to compare.*left out: none"):
            agent.train()
        agent.run(INSTRUCTION, task_indices=[GOAL, 4], batch_size=6)
        with pytest.raises(TrainingError, match="6 without a signal"):
            agent.train(task_id="webshop-4")
        assert agent.adapter is None
        report = agent.train(num_epochs=1, task_id=GOAL)
        assert report.used == 6
        everything = agent.train(num_epochs=1)
        assert (everything.used, everything.excluded) == (6, {"no_signal": 6})
    other = write_shopper(tmp_path / "another")
    with RLAgent(other, config=config) as stranger:
        assert stranger.adapter is None
        with pytest.raises(TrainingError, match="12 by other models"):
            stranger.train()


async def test_it_works_inside_a_running_loop(model: Path, config: RLAgentConfig) -> None:
    agent = RLAgent(model, config=config)
    assert asyncio.get_running_loop().is_running()
    episodes = agent.run(INSTRUCTION, task_indices=[GOAL], batch_size=2)
    assert [episode["failure"] for episode in episodes] == [None, None]
    agent.close()
    agent.close()
    with pytest.raises(RuntimeError, match="closed"):
        agent.run(INSTRUCTION)


def test_a_dead_environment_is_a_failure_and_no_zero(model: Path, config: RLAgentConfig) -> None:
    dead = changed(config, env_server_base="http://127.0.0.1", env_port=9)
    with RLAgent(model, config=dead) as agent:
        (episode,) = agent.run(INSTRUCTION)
        assert episode["reward"] is None and episode["stop"] == "error"
        assert "nothing answers at http://127.0.0.1:9" in (episode["failure"] or "")
        with pytest.raises(TrainingError, match=r"\d failed"):
            agent.train()


def test_an_endpoint_gets_the_new_adapter(model: Path, config: RLAgentConfig, tmp_path: Path) -> None:
    serving = ServerConfig(model=str(model), served_model_name="shopper", port=0, dtype="float32", adapters="/")
    with running_server(serving) as url:
        with RLAgent(f"{url}/v1", config=config) as agent:
            before = agent.run(INSTRUCTION, task_indices=[GOAL], batch_size=16)
            for _ in range(2):
                report = agent.train(num_epochs=1)
            after = agent.run(INSTRUCTION, task_indices=[GOAL], batch_size=4)
        served = {card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]}
        assert served == {"shopper", "policy-v000002"}
        assert report.adapter.base_model == "shopper"
        policies = {trajectory.id: trajectory.policy for trajectory, _ in stored(config)}
        assert policies[before[0]["trajectory_id"]] == PolicyRef(base_model="shopper")
        assert policies[after[0]["trajectory_id"]] == PolicyRef(base_model="shopper", adapter="policy", version=2)
        httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "policy-v000002"}).raise_for_status()
        with RLAgent(url, config=config) as resumed:
            assert resumed.run(INSTRUCTION, task_indices=[GOAL])[0]["failure"] is None
        impostor = write_shopper(tmp_path / "impostor")
        with RLAgent(url, tokenizer=impostor, config=config) as deceived:
            with pytest.raises(PublishError):
                deceived.train(num_epochs=1)
            assert deceived.policy.version == 2
        with pytest.raises(ConfigError, match=r"shopper.*\[rl.serving\] model"):
            RLAgent(url, config=changed(config, serving={**config.serving.model_dump(), "model": "shoper"}))


def test_wrong_arguments_are_refused_with_the_remedy(model: Path, config: RLAgentConfig, tmp_path: Path) -> None:
    with pytest.raises(RLError, match="cannot load the model"):
        RLAgent(tmp_path / "nothing", config=config)
    with pytest.raises(InfrastructureError, match="no model server answers"):
        RLAgent("http://127.0.0.1:9/v1", config=config)
    with pytest.raises(ConfigError, match="NoSuchKlass"):
        RLAgent(model, config=changed(config, env_name="test_rl_agent:NoSuchKlass"))
    with RLAgent(model, config=changed(config, max_turns=2)) as agent:
        for arguments, remedy in (({"max_rounds": 0}, "max_rounds must be"), ({"task_indices": [1, 1]}, "batch_size")):
            with pytest.raises(ConfigError, match=remedy):
                agent.run(INSTRUCTION, **arguments)
        with pytest.raises(ConfigError, match="learning_rate"):
            agent.train(learning_rate=-1.0)
        ended = [*agent.run(INSTRUCTION), *agent.run(INSTRUCTION, max_rounds=1)]
    assert [(len(actions(each)), each["stop"]) for each in ended] == [(2, "max_turns"), (1, "max_turns")]


def test_an_interrupt_cancels_what_is_under_way() -> None:
    cleaned_up = threading.Event()

    async def long() -> None:
        main = threading.main_thread().ident
        assert main is not None
        try:
            asyncio.get_running_loop().call_later(0.1, signal.pthread_kill, main, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned_up.set()

    with closing(LoopThread("test")) as thread:
        with pytest.raises(KeyboardInterrupt):
            thread.wait_for(long())
        assert cleaned_up.is_set()
