"""Rollouts and training side by side: bounds on staleness, what is used up, interruptions, a server that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shopper_model import shop_and_server
from shopping_loop import MODEL, ShopWorld, make_plan, write_talker

from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.training.loop.loop import LoopListener, LoopParts, TrainingLoop
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord

BEHIND = {"kind": "async", "max_staleness": 1}
ITERATIONS = [f"iteration-{index:03d}" for index in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[ShopWorld]:
    with shop_and_server(model, MODEL) as urls:
        yield ShopWorld(*urls, model)


@pytest.fixture
def world(served: ShopWorld) -> ShopWorld:
    return ShopWorld(served.shop, served.server, served.model)


async def finish(parts: LoopParts) -> None:
    await parts.storage.close()
    await parts.publisher.aclose()


async def rollouts(parts: LoopParts) -> list[Trajectory]:
    runs = [TrajectoryFilter(run_id=f"shopping/{name}") for name in [*ITERATIONS, "iteration-003"]]
    return [found for run in runs async for found, _ in parts.storage.find(run)]


def iterations(state: LoopState) -> list[dict[str, float]]:
    return [record.metrics for record in state.records if record.name in ITERATIONS]


async def test_rollouts_go_on_while_the_policy_is_trained(world: ShopWorld, tmp_path: Path) -> None:
    parts = world.parts(tmp_path)
    state = await TrainingLoop(make_plan("beside", **BEHIND), parts).run()
    assert [record.name for record in state.records][4:] == [*ITERATIONS, "evaluate-final"]
    groups = [record.groups for record in state.records if record.groups]
    assert sorted(number for each in groups for number in each) == list(range(6))
    trajectories = await rollouts(parts)
    assert len(trajectories) == 24 and not any(trajectory.failure for trajectory in trajectories)
    assert {node.policy.adapter for each in trajectories for node in each.sampled() if node.policy} == {"beside"}

    figures = iterations(state)
    assert [each["episodes"] for each in figures] == [8.0, 8.0, 8.0]
    assert figures[0]["staleness"] == 0 and 0 < max(each["staleness"] for each in figures) <= 1
    assert all(0 < each["weight"] <= 2 for each in figures), "stale tokens are weighed by their recorded logprobs"
    # The second batch began on the weights that the first one was to improve, before that was trained on.
    first = next(record for record in state.records if record.name == ITERATIONS[0])
    trained_from = first.finished - first.metrics["training_seconds"] - first.metrics["publish_seconds"]
    assert any(each.times.started < trained_from for each in trajectories if each.group_id.split("/")[2] >= "000002")
    assert parts.adapters.current("beside") == parts.adapters.get(state.adapter or "")
    await finish(parts)


async def test_a_teacher_teaches_beside_the_rewards(world: ShopWorld, tmp_path: Path) -> None:
    """The base model teaches by its server; the first version is the base model itself, so that it teaches nothing."""
    url = f"{world.server}/v1"
    parts = world.parts(tmp_path)
    training = {"algorithm": "grpo", "correction": "none", "learning_rate": 3e-2}
    training |= {"teacher": url, "teacher_model": MODEL}
    plan = make_plan("taught", training, iterations=2, demonstrations=0)
    state = await TrainingLoop(plan, parts).run()
    first, second = iterations(state)
    assert first["steps"] == second["steps"] == 1
    assert abs(first["kl"]) < 1e-3 < abs(second["kl"]), "the policy has moved away by then"
    await finish(parts)


class Slow:
    """An engine that answers when it is let."""

    def __init__(self, engine: LLMEngine, gate: asyncio.Event) -> None:
        self._engine, self._gate = engine, gate

    async def complete(self, messages: Any, **options: Any) -> Any:
        await self._gate.wait()
        return await self._engine.complete(messages, **options)


@pytest.mark.slow
async def test_what_others_have_overtaken_is_dropped_and_counted(world: ShopWorld, tmp_path: Path) -> None:
    gate = asyncio.Event()

    def around(request: EpisodeRequest, engine: LLMEngine) -> LLMEngine:
        straggles = "/000001/" in request.group_id and "/iteration-" in request.run_id
        return Slow(engine, gate) if straggles else engine

    world.around_engine = around
    parts = world.parts(tmp_path, keep=5)
    plan = make_plan("late", tasks_per_iteration=1, samples_per_task=2, iterations=4, **BEHIND)
    # Version 2 is in use after the first iteration; two later the straggler is of no use any more.
    listener = Listener(then=lambda stage: gate.set() if stage == ITERATIONS[2] else None)
    state = await TrainingLoop(plan, parts, listener).run()
    last = next(record for record in state.records if record.name == "iteration-003")
    assert last.groups == (4, 1)
    assert (last.metrics["groups_dropped"], last.metrics["episodes_stale"]) == (1, 2)
    await finish(parts)


class Killed(Exception):
    """Stands for a power cut."""


class Listener(LoopListener):
    """Calls ``then`` with a stage's name when it is finished, and ``step`` with it at each of its optimiser steps."""

    def __init__(self, then: Callable[[str], object] = str, step: Callable[[str], object] = str) -> None:
        self.then, self.step = then, step

    def stage_finished(self, record: StageRecord) -> None:
        self.then(record.name)

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        if activity == "training":
            self.step(stage)


async def test_an_interrupted_run_loses_nothing_and_trains_nothing_twice(world: ShopWorld, tmp_path: Path) -> None:
    plan, parts = make_plan("again", demonstrations=0, min_success=0, **BEHIND), world.parts(tmp_path)

    def kill(stage: str) -> None:
        if stage == ITERATIONS[1]:
            raise Killed

    with pytest.raises(Killed):
        await TrainingLoop(plan, parts, Listener(step=kill)).run()
    # What was being stored when the run ended is on the disk once the storage is closed.
    await finish(parts)
    before = {each.id: each for each in await rollouts(parts)}
    await parts.storage.close()
    chosen = LoopState.load(tmp_path / "state.json").batch
    assert chosen is not None and chosen.stage == ITERATIONS[1] and len(chosen.trajectories) == 8

    world.asked.clear()
    parts = world.parts(tmp_path)
    state = await TrainingLoop(plan, parts).run()
    record = state.record(ITERATIONS[1])
    assert record is not None and record.groups == chosen.groups
    assert sorted(number for each in state.records for number in each.groups) == list(range(6))
    after = {each.id: each for each in await rollouts(parts)}
    assert before.items() <= after.items() and len(after) == 24, "what was finished was not rolled out again"
    assert sum("/iteration-" in each.run_id for each in world.asked) == 24 - len(before)
    assert len({each.task.id for each in after.values()}) == 6, "it went on with the tasks that it had not met"
    await finish(parts)


async def test_a_cancelled_loop_ends_with_the_step_under_way(world: ShopWorld, tmp_path: Path) -> None:
    plan = make_plan("cancelled", {"num_epochs": 5_000}, iterations=1, demonstrations=0)
    parts, steps = world.parts(tmp_path), list[str]()
    running = asyncio.create_task(TrainingLoop(plan, parts, Listener(step=steps.append)).run())
    while not steps:
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    at_most = len(steps) + 1
    await asyncio.sleep(0.3)
    assert len(steps) <= at_most
    await finish(parts)


class Outage(LoopListener):
    """Stops the server when a stage begins, and starts it again a while later, without any adapter."""

    def __init__(self, config: ServerConfig, generator: Generator, seconds: float, stage: str = ITERATIONS[1]) -> None:
        self.config, self.generator, self.seconds, self.stage = config, generator, seconds, stage
        self.activities: list[str] = []
        self.serving = running_server(config, generator)
        self.url = self.serving.__enter__()
        self.back: asyncio.TimerHandle | None = None

    def stage_started(self, name: str) -> None:
        if name == self.stage:
            self.serving.__exit__(None, None, None)
            for adapter in self.generator.adapters:
                self.generator.unload_adapter(adapter.name)
            self.back = asyncio.get_running_loop().call_later(self.seconds, self.start)

    def start(self) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        self.serving = running_server(self.config.model_copy(update={"port": port}), self.generator)
        self.serving.__enter__()

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        self.activities.append(activity)


@pytest.mark.slow
async def test_a_server_that_is_away_pauses_the_loop(served: ShopWorld, tmp_path: Path) -> None:
    config = ServerConfig(
        model=str(served.model), served_model_name=MODEL, port=0, dtype="float32", max_adapters=64, adapters="/"
    )
    with Generator(config) as generator:
        outage = Outage(config, generator, 1.0)
        world = ShopWorld(served.shop, outage.url, served.model)
        parts = world.parts(tmp_path)
        state = await TrainingLoop(make_plan("outage", **BEHIND), parts, outage).run()
        outage.serving.__exit__(None, None, None)
    assert any(activity.startswith("paused: no model server answers at http") for activity in outage.activities)
    assert "going on" in outage.activities
    assert [each["episodes_used"] + each.get("episodes_no_signal", 0) for each in iterations(state)] == [8, 8, 8]
    assert [each["failed"] for each in iterations(state)] == [0, 0, 0]
    await finish(parts)
