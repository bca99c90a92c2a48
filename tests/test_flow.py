"""ONE task through everything: real controller, real shop, real server, real training, and the adapter in service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from needs import CONTRIB
from report_data import data_of
from shopper_model import shop_and_server, write_shopper
from shopping_loop import MODEL, ShopWorld, make_plan
from small_shop import GOAL, INSTRUCTION

from openhands_rl_plugin.apps.loop.reporting import RunReport
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.hosts.pool import local_runner
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.training.loop.loop import LoopListener, LoopParts, TrainingLoop
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState, RunFacts, StageRecord

pytestmark = pytest.mark.contract

STAGES = ["evaluate-base", "demonstrate", "warm-start", "evaluate-warm-start", "iteration-000", "evaluate-final"]
TASK = Task(id=f"webshop-{GOAL}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL})


class Killed(Exception):
    """Stands for a power cut between two stages."""


class KillAfter(LoopListener):
    def __init__(self, stage: str) -> None:
        self.stage = stage

    def stage_finished(self, record: StageRecord) -> None:
        if record.name == self.stage:
            raise Killed


class Collector(LoopListener):
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.first: dict[str, tuple[str, int, int]] = {}

    def stage_started(self, name: str) -> None:
        self.begun.append(name)

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        self.first.setdefault(stage, (activity, done, total))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shopper(tmp_path_factory.mktemp("flow") / "model")


@pytest.fixture
def world(model: Path) -> Iterator[ShopWorld]:
    with shop_and_server(model, MODEL) as urls:
        yield ShopWorld(*urls, model)


def plan(world: ShopWorld) -> LoopPlan:
    sizes = {"iterations": 1, "tasks_per_iteration": 1, "samples_per_task": 8, "base_held_out": 1}
    made = make_plan("flow", {"learning_rate": 1e-2, "correction": "none"}, run_id="flow", **sizes)
    own = {
        "max_turns": 4,
        "max_response_length": 48,
        "react_format": False,
        "env_server_base": world.shop,
        "serving": ServingSettings(base_url=f"{world.server}/v1", model=MODEL, adapter="flow"),
    }
    other = TASK.model_copy(update={"id": f"webshop-{GOAL + 1}", "data": {"idx": GOAL + 1}})
    tasks = {"demonstrations": (TASK,), "training": (TASK,), "held_out": (TASK, other)}
    warm_start = made.warm_start.model_copy(update={"learning_rate": 1e-4})
    return made.model_copy(update={"settings": made.settings.model_copy(update=own), "warm_start": warm_start, **tasks})


def parts(world: ShopWorld, directory: Path) -> LoopParts:
    """With a runner as commands make it."""
    made = world.parts(directory)
    return replace(made, runner=local_runner(plan(world).settings, storage=made.storage), objective=ReturnReward())


async def finish(loop_parts: LoopParts) -> None:
    await loop_parts.runner.close()
    await loop_parts.storage.close()
    await loop_parts.publisher.aclose()


@pytest.mark.timeout(240)
async def test_one_task_through_everything(world: ShopWorld, tmp_path: Path) -> None:
    """Stopped after the warm start and begun again, the loop ends with the adapter that it trained in service."""
    first = parts(world, tmp_path)
    with pytest.raises(Killed):
        await TrainingLoop(plan(world), first, listener=KillAfter("warm-start")).run()
    await finish(first)

    again, seen, saved = parts(world, tmp_path), Collector(), list[str]()

    async def save(state: LoopState) -> None:
        saved.append(state.records[-1].name)

    state = await TrainingLoop(plan(world), again, listener=seen, on_saved=save).run()
    assert seen.begun == saved == STAGES[3:] and plan(world).settings.loop.stages == len(STAGES)
    assert [record.name for record in state.records] == STAGES
    assert seen.first["evaluate-warm-start"] == ("episodes", 0, 2), "how many there are is known before the first ends"
    assert [record.metrics["episodes"] for record in state.records if record.name.startswith("evaluate")] == [1, 2, 2]

    await check_trajectories(again, state)
    await check_service(world.server, again, state)
    report = RunReport(
        RunFacts.begin(tmp_path, plan(world), title="flow", stages=len(STAGES)),
        plan(world),
        directory=tmp_path,
        storage=again.storage,
        adapters=again.adapters.root,
        model=world.model,
        reward_version=ReturnReward.version,
        noted=lambda line: None,
    )
    await report.write(state)
    shown = ("flow-v000002", "click[Buy Now]", "After RL against SFT")  # by the studio, which is in contrib
    assert not CONTRIB or all(words in json.dumps(data_of(report.path)) for words in shown)
    await finish(again)


async def check_trajectories(loop_parts: LoopParts, state: LoopState) -> None:
    where = TrajectoryFilter(run_id="flow/iteration-000")
    stored = [found async for found in loop_parts.storage.find(where)]
    assert len(stored) == 8
    for trajectory, scores in stored:
        assert trajectory.failure is None
        assert trajectory.task == TASK
        assert scores[-1].reward == pytest.approx(trajectory.episode_return)
        sampled = list(trajectory.sampled())
        assert {node.policy.version for node in sampled if node.policy} == {1}
        assert all(node.tokens and len(node.tokens.logprobs) == len(node.tokens.sampled_ids) for node in sampled)
        assert all(node.tokens and node.tokens.extends for node in sampled[1:])
    rewards = {trajectory.episode_return for trajectory, _ in stored}
    assert len(rewards) > 1, "a group without differing rewards would have nothing to reinforce"
    record = state.record("iteration-000")
    assert record is not None and record.metrics["episodes_used"] == 8


async def check_service(server: str, loop_parts: LoopParts, state: LoopState) -> None:
    trained = loop_parts.adapters.get("flow-v000002")
    assert trained.parent == "flow-v000001"
    assert loop_parts.adapters.current("flow") == trained
    assert state.adapter == trained.name
    loop_parts.adapters.verify(trained)
    async with httpx.AsyncClient() as client:
        listed = (await client.get(f"{server}/v1/models")).json()
    assert trained.name in {model["id"] for model in listed["data"]}
    final = [t async for t, _ in loop_parts.storage.find(TrajectoryFilter(run_id="flow/evaluate-final"))]
    assert {trajectory.policy.served_name for trajectory in final} == {trained.name}
