"""Pivots: what is judged equal, what is trained, what a kill leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shopper_model import BAD, GOAL, GOOD, INSTRUCTION, SHOP, write_shopper
from shopping_loop import MODEL, ShopWorld, make_plan

from openhands_rl_plugin.config.rl import LoopSettings
from openhands_rl_plugin.contrib.webshop import running_webshop
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, StopReason, Task, Trajectory
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.prefix import DIFFERED
from openhands_rl_plugin.rollout.rescoring import rescore
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.loop.decisions import SingleAnswers, decisions_of
from openhands_rl_plugin.training.loop.pivots import Pivots
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState
from openhands_rl_plugin.training.loop.stages import LoopListener, LoopParts
from openhands_rl_plugin.training.loop.sync import ClosedLoop

TASKS = tuple(
    Task(id=f"webshop-{letter}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL}, split="train")
    for letter in "abc"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShopWorld]:
    """The shop, and a model that buys the right thing in about half of its episodes."""
    model = write_shopper(tmp_path_factory.mktemp("shopper") / "model")
    server = ServerConfig(model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8)
    with running_webshop(SHOP) as shop, running_server(server) as url:
        yield ShopWorld(shop, url, model)


@pytest.fixture
async def parts(world: ShopWorld, tmp_path: Path) -> AsyncIterator[LoopParts]:
    engines: list[OpenAIEngine] = []

    def engine(served: str) -> LLMEngine:
        engines.append(OpenAIEngine(served, f"{world.server}/v1", base_model=MODEL))
        return engines[-1]

    made = replace(world.parts(tmp_path), objective=ReturnReward(), engine=engine)
    yield made
    for each in engines:
        await each.aclose()
    await made.publisher.aclose()
    await made.storage.close()


def plan(**changes: object) -> LoopPlan:
    sizes = {"training": TASKS[:2], "held_out": TASKS[2:], "iterations": 1, "samples_per_task": 6}
    sampled = {"temperature": 1.0, "max_tokens": 40}
    chosen = {"demonstrations": (), "pivots": 2, "pivot_updates": 2, "sampling": sampled, "evaluation": sampled}
    return make_plan("pivoting", **{**sizes, **chosen, **changes})


async def everything(parts: LoopParts) -> list[Trajectory]:
    return [each async for each, _ in parts.storage.find(TrajectoryFilter(finished=None))]


async def of_run(parts: LoopParts, stage: str) -> list[Trajectory]:
    found = [each for each in await everything(parts) if each.run_id == f"shopping/{stage}"]
    return sorted(found, key=lambda each: (each.group_id, each.id))


class Killed(Exception):
    """The process died."""


class Kills(LoopListener):
    """Dies the first time that ``activity`` of ``stage`` has come so far."""

    def __init__(self, stage: str, activity: str, done: int) -> None:
        self.at = (stage, activity, done)

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        if (stage, activity, done) == self.at:
            raise Killed


@pytest.mark.slow
async def test_a_loop_trains_single_decisions_between_its_iterations(world: ShopWorld, parts: LoopParts) -> None:
    """Killed three times. Of the three turns only the second one decides: which product is looked at."""
    for kill in (("0", "answers", 7), ("0", "answers valued", 2), ("1", "answers", 2)):
        with pytest.raises(Killed):
            await asyncio.wait_for(ClosedLoop(plan(), parts, Kills(f"pivots-000-{kill[0]}", *kill[1:])).run(), 200)
        assert LoopState.load(parts.state_file).record("evaluate-final") is None
    before = await everything(parts)
    world.asked.clear()
    state = await asyncio.wait_for(ClosedLoop(plan(), parts).run(), 200)
    names = [record.name for record in state.records]
    assert names == ["evaluate-base", "iteration-000", "pivots-000-0", "pivots-000-1", "evaluate-final"]
    assert len({record.adapter for record in state.records[1:4]}) == 3, "each update is published"
    assert {request.run_id for request in world.asked} == {"shopping/evaluate-final"}, "nothing is played twice"
    after = {each.id: each for each in await everything(parts)}
    assert all(after[each.id] == each for each in before if each.stop is not StopReason.UNFINISHED)
    first, second = (record.metrics for record in state.records[2:4])
    assert first["pivots"] == second["pivots"] and first["answers"] == 6 * first["decisions"]
    assert second["decisions"] == second["pivots"] and second["answers_failed"] == second["answers_unvalued"] == 0
    assert first["answers_tried"] and first["valuing_episodes"]
    assert second["answers_tried"] == second["valuing_episodes"] == 0, "known answers need no environment"
    assert {each.task.id for each in after.values() if "/pivots-" in each.run_id} <= {"webshop-a", "webshop-b"}
    for stage in names[2:4]:
        answers = await of_run(parts, stage)
        answers = answers if stage == names[3] else [each for each in answers if is_pivot(each)]
        assert {each.messages()[-1].content for each in answers} >= {GOOD[1], BAD[1]}
        values = [float(each.messages()[-1].content == GOOD[1]) for each in answers]
        for each in credited_samples(answers, values, plan().reinforcement).samples:
            node = after[each.trajectory_id].nodes[each.leaf]
            assert node.tokens is not None and not node.tokens.extends
            assert each.input_ids == node.tokens.prompt_ids + node.tokens.sampled_ids, "one turn, after its prompt"
            prompt = len(node.tokens.prompt_ids)
            assert each.mask == (False,) * prompt + (True,) * len(node.tokens.sampled_ids)
            assert (each.advantage > 0) == (node.message.content == GOOD[1])
    again = await Pivots(plan(), parts).groups(0, 1, MODEL, lambda *_: None)
    assert {each.id for each in again.answers} == {each.id for each in await of_run(parts, "pivots-000-1")}
    paid = {each.messages()[-1].content: value for each, value in zip(again.answers, again.values, strict=True)}
    assert paid[GOOD[1]] > paid[BAD[1]], "as the shop pays for the products"


def is_pivot(answer: Trajectory) -> bool:
    """Whether it is of the second turn."""
    return sum(node.sampled for node in answer.nodes) == 2


async def test_nothing_is_learnt_from_held_out_tasks_nor_from_another_prompt(parts: LoopParts) -> None:
    held_out = [each.model_copy(update={"split": "heldout"}) for each in TASKS[:1]]
    for index, tasks in enumerate((TASKS[:1], held_out)):
        run_id = f"shopping/iteration-{index:03d}"
        rollouts = RolloutPlan(run_id=run_id, tasks=tuple(tasks), samples_per_task=2, sampling=plan().sampling)
        await roll_out(rollouts, parts.runner, parts.storage)
        await rescore(parts.storage, parts.objective, TrajectoryFilter(run_id=run_id))
    pivots = Pivots(plan(samples_per_task=2, pivots=1), parts)
    groups = await pivots.groups(1, 0, MODEL, lambda *_: None)
    assert not groups.answers and groups.metrics["decisions"] == 0
    source = await of_run(parts, "iteration-000")
    decisions = decisions_of([(each, 1.0, True) for each in source])
    assert [sum(node.sampled for node in each.path) for each in decisions][:3] == [0, 1, 2]
    assert parts.engine is not None
    for number, decision in enumerate(decisions[:2]):
        other = replace(decision, prompt_ids=decision.prompt_ids[:-1]) if number else decision
        request = EpisodeRequest(
            task=decision.task, run_id="single", group_id="single", prefix=decision.path, sampling=decision.sampling
        )
        answer = await SingleAnswers(parts.engine, MODEL, {"single": other}).run(request)
        assert (answer.failure is not None and answer.failure.boundary == DIFFERED) == bool(number)


@pytest.mark.parametrize("changes", [{"kind": "async"}, {"prefix_sampling": "adaptive"}])
def test_what_has_no_pivots_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="pivots"):
        LoopSettings.model_validate({"pivots": 2, **changes})
    assert LoopSettings(pivots=2, pivot_updates=3, iterations=2).stages == 10
