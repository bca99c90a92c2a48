"""Prefix sampling in a loop: which groups begin where, what is compared, what is trained, and what a kill leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from credited_episodes import settings
from hypothesis import given
from hypothesis import strategies as st
from made_samples import EXACT, plain_gradients
from shopper_model import SHOP
from shopping_loop import MODEL, TASKS, ShopWorld, make_plan, write_talker
from tiny_model import write_model

from openhands_rl_plugin.config.rl import LoopSettings
from openhands_rl_plugin.contrib.webshop import running_webshop
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, prefix_of
from openhands_rl_plugin.core.types import Message, Node, PolicyRef, Sample, StrategySpec, Task, Tokens, Trajectory
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.in_process import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine, example_trajectory
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.data.batch import is_recorded, recorded_nodes, samples_of, trained_nodes
from openhands_rl_plugin.training.data.dataset import Episodes, ExcludedEpisodes, build_dataset
from openhands_rl_plugin.training.data.eligibility import regrouped
from openhands_rl_plugin.training.loop.asynchronous import make_loop
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState
from openhands_rl_plugin.training.loop.prefixes import PrefixSampler, cut_after
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

WALK = Task(id="walk", environment="grid")
GOOD, BAD = ("right", "right", "down", "down"), ("left",) * 10


def runner(*scripts: Sequence[str]) -> SessionRunner:
    """Sessions that play one script after the other."""
    ways = iter(scripts)
    return SessionRunner(
        make_environment=lambda request: GridEnvironment(),
        make_strategy=lambda request: StandardReActStrategy(),
        make_engine=lambda request: ScriptedEngine(next(ways)),
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="script",
    )


class Run:
    """Iterations over one task, whose outcomes are told."""

    def __init__(self, storage: TrajectoryStorage, **changes: object) -> None:
        plan = {"run_id": "run", "training": (WALK,), "prefix_sampling": "adaptive", **changes}
        self.plan: LoopPlan = make_plan("walker", **plan)
        self.storage = storage
        self.sampler = PrefixSampler(self.plan, storage, ReturnReward(), ReturnReward())

    async def choose(self, iteration: int) -> tuple[Node, ...]:
        stage = f"run/iteration-{iteration:03d}"
        return await self.sampler.choose(WALK, stage, f"{stage}/walk")

    async def iterate(self, iteration: int, *scripts: Sequence[str]) -> list[Trajectory]:
        plan = RolloutPlan(
            run_id=f"run/iteration-{iteration:03d}",
            tasks=(WALK,),
            samples_per_task=len(scripts),
            prefixes={"walk": await self.choose(iteration)},
            concurrency=1,
        )
        return list(await roll_out(plan, runner(*scripts), self.storage))


def told(played: Sequence[Trajectory]) -> tuple[str, int] | None:
    [one] = {note.in_words() if (note := prefix_of(each)) else "" for each in played}
    note = prefix_of(played[0])
    return None if not one or note is None else (note.trajectory, note.turns if note.good else -note.turns)


async def test_a_task_that_nobody_solves_begins_further_on_until_it_is_solved(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        [demonstration] = await roll_out(RolloutPlan(run_id="demonstrations", tasks=(WALK,)), runner(GOOD), storage)
        run = Run(storage)
        assert told(await run.iterate(0, BAD, BAD)) is None, "nothing is known of the task"
        assert told(await run.iterate(1, BAD, BAD)) == (demonstration.id, 2)
        assert told(await run.iterate(2, BAD, BAD)) == (demonstration.id, 3)
        assert told(await run.iterate(3, BAD, GOOD[3:])) == (demonstration.id, 3)
        [own] = [each.id async for each, _ in storage.find(of_iteration(3)) if each.episode_return]
        solved = await run.iterate(4, GOOD[3:], GOOD[3:])
        assert told(solved) == (own, 3), "a task with a signal stays there; the run's own successes come first"
        later = await run.iterate(5, GOOD[1:], GOOD[1:])
        assert (note := told(later)) is not None and note[0] in {own, *(each.id for each in solved)} and note[1] == 1
        assert told(await run.iterate(6, GOOD, BAD)) is None, "and at last it is as hard as it was"


def of_iteration(number: int) -> TrajectoryFilter:
    return TrajectoryFilter(run_id=f"run/iteration-{number:03d}")


async def test_a_task_that_is_always_solved_begins_with_a_part_of_a_failure(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        run = Run(storage)
        mixed = await run.iterate(0, GOOD, BAD)
        assert told(await run.iterate(1, GOOD, GOOD)) is None, "it had a signal"
        worse = await run.iterate(2, GOOD, BAD)
        assert told(worse) == (mixed[1].id, -5), "half of the ten turns"
        assert (note := told(await run.iterate(3, GOOD, GOOD))) is not None and note[1] == -5, "it had a signal"
        assert (note := told(await run.iterate(4, GOOD, GOOD))) is not None and note[1] == -7, "now it has none"


async def test_without_a_source_or_the_setting_a_start_is_plain(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        run = Run(storage)
        await run.iterate(0, BAD, BAD)
        assert await run.choose(1) == (), "nobody ever solved it"
        held_out = WALK.model_copy(update={"split": "heldout"})
        other = WALK.model_copy(update={"instruction": "slowly"})
        await roll_out(RolloutPlan(run_id="evaluation", tasks=(held_out,)), runner(GOOD), storage)
        await roll_out(RolloutPlan(run_id="elsewhere", tasks=(other,)), runner(GOOD), storage)
        assert await run.choose(1) == (), "nothing is learnt from what measures, nor from another task"
        await roll_out(RolloutPlan(run_id="demonstrations", tasks=(WALK,)), runner(GOOD), storage)
        assert await run.choose(1) != ()
        assert await Run(storage, prefix_sampling="none").choose(1) == ()


async def test_a_killed_iteration_keeps_its_prefix_whatever_is_stored_meanwhile(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        await roll_out(RolloutPlan(run_id="demonstrations", tasks=(WALK,)), runner(GOOD), storage)
        run = Run(storage)
        await run.iterate(0, BAD, BAD)
        begun = await run.choose(1)
        await run.iterate(1, BAD)
        for name in ("a", "b", "c"):
            await roll_out(RolloutPlan(run_id=name, tasks=(WALK,)), runner(GOOD), storage)
        assert await run.choose(1) == begun
        await run.iterate(2, BAD, BAD)
        assert await run.choose(1) == begun, "later groups change nothing"
        plain = await Run(storage).sampler.choose(WALK, "run/iteration-000", "run/iteration-000/walk")
        assert plain == (), "nor does a group that began plainly change"


@given(share=st.floats(-1, 1), turns=st.integers(2, 40))
def test_a_cut_leaves_a_turn_and_is_plain_near_zero(share: float, turns: int) -> None:
    cut = cut_after(share, turns)
    assert 0 <= cut < turns and abs(cut - abs(share) * turns) <= 1
    assert cut_after(0.5, turns) >= 1 and cut_after(0.0, turns) == 0
    # From any cut, halving comes to a plain start, and growing to the last turn.
    easier, harder = cut, max(cut, 1)
    for _ in range(10):
        easier, harder = cut_after(easier / turns / 2, turns), cut_after((harder / turns + 1) / 2, turns)
    assert (easier, harder) == (0, turns - 1)


# What is trained


def said(parent: int, *, replayed: bool, tokens: Tokens | None) -> Node:
    note = {"prefix": {"trajectory": "other", "turns": 1, "of": 2, "good": True}} if replayed else {}
    message = Message(role="assistant", content="!")
    policy = None if replayed else PolicyRef(base_model="base")
    return Node(parent=parent, message=message, sampled=True, tokens=tokens, reward=0.0, metadata=note, policy=policy)


def prefixed(number: int, prompt: tuple[int, ...], sampled: tuple[int, ...], then: tuple[int, ...]) -> Trajectory:
    """One replayed answer, two sampled ones."""
    asked = Message(role="user", content="?")
    logprobs = (-6.2,) * len(sampled)
    nodes = (
        Node(parent=None, message=asked),
        said(0, replayed=True, tokens=None),
        Node(parent=1, message=asked),
        said(2, replayed=False, tokens=Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs)),
        Node(parent=3, message=asked),
        said(4, replayed=False, tokens=Tokens(extends=True, prompt_ids=then, sampled_ids=(7, 8), logprobs=(-6.0,) * 2)),
    )
    changes = {"id": str(number), "group_id": "g", "failure": None, "head": 5, "nodes": nodes}
    return example_trajectory().model_copy(update=changes)


PROMPT = tuple(range(20, 60))


@pytest.mark.parametrize(
    "changes",
    [{}, {"step_rewards": "environment"}, {"state_weight": 0.5}, {"tree": "branches"}, {"algorithm": "gspo"}],
    ids=str,
)
def test_nothing_of_a_prefix_is_trained(changes: dict[str, object]) -> None:
    episodes = [prefixed(0, PROMPT, (3, 4), (9,)), prefixed(1, PROMPT, (5,), (9, 10))]
    samples = credited_samples(episodes, [1.0, 0.0], settings(**{"algorithm": "grpo"} | changes)).samples
    for sample, (ids, mask) in zip(
        samples, [((*PROMPT, 3, 4, 9, 7, 8), "11011"), ((*PROMPT, 5, 9, 10, 7, 8), "10011")], strict=True
    ):
        assert sample.input_ids == ids
        assert sample.mask == (False,) * len(PROMPT) + tuple(each == "1" for each in mask)
    assert [node for sample in samples for node, *_ in sample.spans] == [3, 5, 3, 5]


def test_the_gradient_is_that_of_the_rest_alone(tmp_path: Path) -> None:
    """Against transformers and autograd, with the sequences written out by hand."""
    model = write_model(tmp_path / "model")
    changes = {"num_epochs": 1, "max_grad_norm": 1e9, "old_logprobs": "recorded", "clip_high": 0.28}
    chosen = EXACT.model_copy(update={"algorithm": "rloo", **changes})
    episodes = [prefixed(0, PROMPT, (3, 4), (9,)), prefixed(1, PROMPT, (5,), (9, 10))]
    samples = credited_samples(episodes, [1.0, 0.0], chosen).samples
    by_hand = [
        hand((*PROMPT, 3, 4, 9, 7, 8), {40: -6.2, 41: -6.2, 43: -6.0, 44: -6.0}, samples[0].advantage),
        hand((*PROMPT, 5, 9, 10, 7, 8), {40: -6.2, 43: -6.0, 44: -6.0}, samples[1].advantage),
    ]
    assert samples[0].advantage > 0 > samples[1].advantage
    trainer = LoraTrainer(model, chosen)
    torch.manual_seed(0)
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    trainer.save_adapter(tmp_path / "adapter")
    expected = plain_gradients(model, tmp_path / "adapter", by_hand)
    trainer.reinforce(samples)
    for name, gradient in expected.items():
        torch.testing.assert_close(trainer.parameters[name].grad, gradient, rtol=2e-4, atol=2e-6, msg=name)


def hand(ids: tuple[int, ...], logprobs: dict[int, float], advantage: float) -> Sample:
    return Sample(
        trajectory_id="hand",
        leaf=0,
        input_ids=ids,
        mask=tuple(at in logprobs for at in range(len(ids))),
        logprobs=tuple(logprobs.get(at, 0.0) for at in range(len(ids))),
        advantage=advantage,
    )


def test_a_prefix_without_token_ids_is_no_gap() -> None:
    one = prefixed(0, PROMPT, (3,), (9,))
    assert is_recorded(one) and 5 in recorded_nodes(one) and trained_nodes(one) == (3, 5)
    [imitated] = samples_of(one, need_logprobs=False)
    assert imitated.mask.count(True) == 3
    other = prefixed(1, PROMPT, (3,), (9,))
    found = Episodes(trajectories=(one, other), returns=(1.0, 0.0), excluded=ExcludedEpisodes())
    dataset = build_dataset(found, settings(algorithm="grpo"))
    assert dataset.used == 2 and dataset.excluded == ExcludedEpisodes()


def test_only_episodes_with_one_beginning_are_compared() -> None:
    one = prefixed(0, PROMPT, (3,), (9,))
    plain = one.model_copy(update={"nodes": tuple(each.model_copy(update={"metadata": {}}) for each in one.nodes)})
    assert regrouped(one, "reinforcement").group_id != regrouped(plain, "reinforcement").group_id
    assert regrouped(one, "imitation").group_id == regrouped(plain, "imitation").group_id


# In the loops


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShopWorld]:
    model = write_talker(tmp_path_factory.mktemp("talker") / "model")
    server = ServerConfig(model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8)
    with running_webshop(SHOP) as shop, running_server(server) as url:
        yield ShopWorld(shop, url, model)


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
async def test_a_loop_begins_where_a_demonstration_was(world: ShopWorld, tmp_path: Path, kind: str) -> None:
    """The demonstration is of the first task; the second one has none. Nobody buys: there is nothing to train on."""
    parts = replace(world.parts(tmp_path), objective=ReturnReward())
    plan = make_plan(
        f"prefixed-{kind}", training=TASKS[:2], held_out=TASKS[:1], samples_per_task=2, prefix_sampling="adaptive"
    )
    settings = LoopSettings.model_validate({"kind": kind, "max_staleness": 0, "prefix_sampling": "adaptive"})
    state = await asyncio.wait_for(make_loop(plan, parts, settings).run(), 120)
    figures = [record.metrics for record in state.records if record.name.startswith("iteration")]
    assert [each["episodes_prefixed"] for each in figures] == [0.0, 2.0, 2.0]
    assert [each["prefixes_differed"] for each in figures] == [0.0] * 3
    everything = [each async for each, _ in parts.storage.find()]
    begun = [each for each in everything if prefix_of(each)]
    assert {each.task.id for each in begun} == {"webshop-a"} and len(begun) == 4
    demonstration = next(each for each in everything if each.run_id.endswith("/demonstrate"))
    assert {note.trajectory for each in begun if (note := prefix_of(each))} == {demonstration.id}
    assert not any(prefix_of(each) for each in everything if "evaluate" in each.run_id)
    assert all(each.policy.adapter == f"prefixed-{kind}" for each in begun), "what was replayed is nobody's policy"
    assert LoopState.load(parts.state_file) == state
    await parts.storage.close()
    await parts.publisher.aclose()
