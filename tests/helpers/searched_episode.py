"""An episode that a search has decided, for the tests of what is made of search trees."""

from __future__ import annotations

import random

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import EpisodeRequest, PolicyRef, StopReason, StrategySpec, Task, Times, Trajectory
from openhands_rl_plugin.rollout.strategies.mcts import MCTSOptions, MCTSStrategy
from openhands_rl_plugin.testing import ScriptedEngine

TASK = Task(id="plan", environment="planning")


async def searched(seed: int = 0) -> Trajectory:
    """Three moves decided by MCTS in a planning world, every one among three."""
    world = PlanningEnvironment(PlanningOptions(seed=seed, depth=3, branching=3))
    drawn = random.Random(seed)
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
