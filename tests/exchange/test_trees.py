"""What search trees give to preference and value training."""

from __future__ import annotations

import random

import pytest

from openhands_rl_plugin.exchange.foreign import LeftOutError
from openhands_rl_plugin.exchange.trees import SMALLEST_MARGIN, preference_rows, value_rows
from openhands_rl_plugin.strategies.mcts import MCTSOptions, MCTSStrategy
from openhands_rl_plugin.testing import ScriptedEngine, example_trajectory
from openhands_rl_plugin.testing_planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import EpisodeRequest, PolicyRef, StopReason, StrategySpec, Task, Times, Trajectory

TASK = Task(id="plan", environment="planning")


async def searched() -> Trajectory:
    world = PlanningEnvironment(PlanningOptions(seed=3, depth=3, branching=3))
    drawn = random.Random(3)
    engine = ScriptedEngine(lambda messages: str(drawn.randrange(3)))
    strategy = MCTSStrategy(MCTSOptions(num_simulations=20, first_branches=3, num_branches=3, value="none"))
    tree = EpisodeTree()
    tree.observe(await world.reset(TASK))
    while not tree.terminated:
        tree.commit(await strategy.decide(tree, engine, world))
        tree.observe(await world.step(tree.action))
    return tree.freeze(
        EpisodeRequest(task=TASK, run_id="run", group_id="group"),
        trajectory_id="searched",
        strategy=StrategySpec(name="MCTS"),
        policy=PolicyRef(base_model="scripted"),
        stop=StopReason.TERMINATED,
        times=Times(started=0.0, finished=1.0),
    )


async def test_siblings_become_pairs_of_the_best_and_the_worst():
    trajectory = await searched()
    pairs = list(preference_rows(trajectory, ()))
    assert pairs
    for pair in pairs:
        assert pair["margin"] >= SMALLEST_MARGIN and pair["chosen"] != pair["rejected"]
        assert pair["prompt"][-1]["role"] == "user" and pair["chosen"][0]["role"] == "assistant"
        assert pair["instance_id"] == "plan" and pair["run_id"] == "run" and pair["trajectory_id"] == "searched"


async def test_every_valued_action_is_a_target_with_the_conversation_that_leads_to_it():
    trajectory = await searched()
    rows = list(value_rows(trajectory, ()))
    valued = [node for node in trajectory.nodes if node.sampled and node.visits and node.value is not None]
    assert sorted(row["value"] for row in rows) == sorted(node.value for node in valued)
    assert sum(row["on_path"] for row in rows) == 3
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


def test_an_episode_without_a_search_has_neither():
    for rows in (preference_rows, value_rows):
        with pytest.raises(LeftOutError):
            list(rows(example_trajectory(0), ()))
