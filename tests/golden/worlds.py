"""Whole episodes of the strategies in planning worlds, whose best return is known: every node, decision and value."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams, Task
from openhands_rl_plugin.testing import ScriptedEngine

PLANNER = {"num_simulations": 40, "exploration_weight": 0.3, "first_branches": 4, "num_branches": 4}
CASES: dict[str, tuple[str, dict[str, Any], range]] = {
    "MCTS": ("MCTS", {**PLANNER, "use_priors": False, "value": "rollout", "seed": 7}, range(12)),
    "side by side": ("MCTS", {**PLANNER, "use_priors": False, "value": "rollout", "seed": 7, "parallel": 8}, range(4)),
    "one open world": ("MCTS", {**PLANNER, "value": "rollout", "seed": 7, "open_worlds": 1}, range(3)),
    "priors": ("MCTS", {"num_simulations": 30, "value": "none", "seed": 3}, range(6)),
    "discount": (
        "MCTS",
        {"value": "none", "seed": 3, "discount": 0.8, "widening": 0.3},
        range(4),
    ),
    "a budget": ("MCTS", {**PLANNER, "value": "none", "seed": 5, "episode_budget": {"calls": 30}}, range(4)),
    "a budget of turns": ("MCTS", {**PLANNER, "value": "none", "seed": 5, "turn_budget": {"steps": 12}}, range(4)),
    "ToT": ("ToT", {"num_branches": 3, "depth": 3, "beam": 2, "value": "none", "seed": 1}, range(8)),
    "ToT with rollouts": ("ToT", {"num_branches": 2, "depth": 2, "value": "rollout", "seed": 1}, range(4)),
    "BestOfN": ("BestOfN", {"n": 4, "value": "rollout", "seed": 2}, range(8)),
    "BestOfN, sampled": ("BestOfN", {"n": 3, "value": "none", "act": "sampled", "seed": 2}, range(4)),
    "ReAct": ("StandardReAct", {}, range(3)),
}


class DrawingEngine(ScriptedEngine):
    """Names a way that is drawn from the seed that is asked for and the conversation; its logprobs are drawn, too."""

    def __init__(self, ways: int) -> None:
        super().__init__([])
        self._ways = ways

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        drawn = random.Random(f"{sampling and sampling.seed}/{len(messages)}/{messages[-1].content}")
        made = await ScriptedEngine([str(drawn.randrange(self._ways)) for _ in range(n)]).complete(
            messages, tools=tools, n=n, sampling=sampling
        )
        for at, each in enumerate(made):
            assert each.tokens is not None
            logprobs = tuple(-round(drawn.random(), 6) for _ in each.tokens.sampled_ids)
            made[at] = each.model_copy(update={"tokens": each.tokens.model_copy(update={"logprobs": logprobs})})
        return made


async def episode(name: str, options: dict[str, Any], seed: int) -> Any:
    world = PlanningEnvironment(PlanningOptions(seed=seed, depth=4, branching=4))
    strategy, engine, tree = registry.build("strategies", name, options), DrawingEngine(4), EpisodeTree()
    tree.observe(await world.reset(Task(id="plan", environment="planning")))
    while not tree.terminated:
        tree.commit(await strategy.decide(tree, engine, world))
        tree.observe(await world.step(tree.action))
    nodes = [
        [node.parent, node.message.role, node.message.content, node.reward, node.simulated, node.value, node.visits]
        for node in tree.nodes
    ]
    world_facts = {"earned": world.earned, "share of the optimum": world.earned / world.optimum}
    return {**world_facts, "path": tree.path(), "usage": tree.usage.model_dump(), "nodes": nodes}


def episodes() -> Any:
    async def play() -> Any:
        return {
            name: {str(seed): await episode(strategy, options, seed) for seed in seeds}
            for name, (strategy, options, seeds) in CASES.items()
        }

    return asyncio.run(play())
