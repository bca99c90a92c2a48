"""MCTS against worlds whose best return is known, and against an independent UCT."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from search_worlds import EveryWayEngine, SeededEngine, opened, planning, report, searched

from evaluation.performance.search.planning import PlanningEnvironment
from openhands_rl_plugin.core.types import Completion, Message, Tokens
from openhands_rl_plugin.rollout.strategies.mcts import Arm, MCTSOptions, MCTSStrategy, best_arm, priors, width
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine

pytestmark = pytest.mark.contract

PLANNER = MCTSOptions(
    num_simulations=40, exploration_weight=0.3, use_priors=False, first_branches=4, num_branches=4, value="rollout"
)


async def test_it_comes_near_the_optimum_with_a_part_of_the_steps_of_looking_at_everything():
    shares, steps = [], []
    for seed in range(20):
        world = planning(seed)
        tree = await searched(MCTSStrategy(PLANNER), world, SeededEngine(seed=seed))
        episode = report(tree, next(at for at in reversed(tree.path()) if tree.nodes[at].sampled))["episode"]
        assert isinstance(episode, dict) and isinstance(episode["steps"], int)
        shares.append(world.earned / world.optimum)
        steps.append((episode["steps"] + world.steps_taken) / world.exhaustive_steps)
    assert statistics.mean(shares) >= 0.95
    assert max(steps) <= 0.6


class ReferenceUCT:
    """UCT as the textbook has it, over the drawn rewards themselves: no tree of messages, no forks, no engine."""

    def __init__(self, world: PlanningEnvironment, weight: float) -> None:
        self.world, self.weight = world, weight
        self.visits: dict[tuple[int, ...], int] = {}
        self.sums: dict[tuple[int, ...], float] = {}

    def simulate(self) -> None:
        path: tuple[int, ...] = ()
        while len(path) < self.world.options.depth:
            ways = [(*path, way) for way in range(self.world.options.branching)]
            total = sum(self.visits.get(way, 0) for way in ways)
            path = max(ways, key=lambda way: self._score(way, total))
            if path not in self.visits:
                break
        gain = 0.0
        for length in range(len(path), 0, -1):
            at = path[:length]
            gain += self.world.worth(at)
            self.visits[at] = self.visits.get(at, 0) + 1
            self.sums[at] = self.sums.get(at, 0.0) + gain

    def _score(self, way: tuple[int, ...], total: int) -> float:
        seen = self.visits.get(way, 0)
        if seen == 0:
            return math.inf
        return self.sums[way] / seen + self.weight * math.sqrt(math.log(total) / seen)


@pytest.mark.parametrize("seed", range(2))
async def test_visits_and_values_agree_with_an_independent_uct(seed: int):
    world = planning(seed, depth=3, branching=3)
    options = MCTSOptions(
        num_simulations=60,
        exploration_weight=0.5,
        use_priors=False,
        first_branches=3,
        num_branches=3,
        widening=0.0,
        value="none",
    )
    tree = await opened(world)
    chosen = await MCTSStrategy(options).decide(tree, EveryWayEngine(), world)
    reference = ReferenceUCT(world, 0.5)
    for _ in range(60):
        reference.simulate()
    for at, node in enumerate(tree.nodes):
        if node.sampled:
            way = tuple(int(tree.nodes[up].message.content or "") for up in tree.path(at) if tree.nodes[up].sampled)
            assert node.visits == reference.visits.get(way, 0), way
            assert node.visits == 0 or node.value == pytest.approx(reference.sums[way] / node.visits)
    assert tree.nodes[chosen].visits == max(reference.visits[(way,)] for way in range(3))


async def test_the_subtree_below_the_committed_move_is_used_again():
    world = planning()
    tree = await opened(world)
    strategy = MCTSStrategy(PLANNER)
    engine = SeededEngine()
    chosen = await strategy.decide(tree, engine, world)
    state = tree.nodes[chosen].metadata["search"]
    assert isinstance(state, dict)
    below = [tree.nodes[at].visits for at in tree.children(int(str(state["state"])))]
    known = len(tree.nodes)
    assert sum(below) > 0
    tree.commit(chosen)
    tree.observe(await world.step(tree.action))
    assert tree.head == state["state"] and len(tree.nodes) == known, "what was simulated became real"
    assert not tree.nodes[chosen].simulated and tree.nodes[chosen].reward == world.earned
    second = await strategy.decide(tree, engine, world)
    assert tree.nodes[second].visits > max(below) - 1
    assert [tree.nodes[at].visits for at in tree.children(tree.head)][: len(below)] >= below


class Biased(ScriptedEngine):
    """Says left with a probability of 0.8 and up with 0.2; ``mute``: without logprobs of up."""

    def __init__(self, *, mute: bool = False) -> None:
        super().__init__([])
        self._mute = mute

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        return [self._completion("left", 0.8), self._completion("up", 0.2)]

    def _completion(self, word: str, probability: float) -> Completion:
        logprobs = () if self._mute and word == "up" else (math.log(probability),) * 3
        tokens = Tokens(prompt_ids=(1,), sampled_ids=(2, 3, 4), logprobs=logprobs)
        return Completion(message=Message(role="assistant", content=word), tokens=tokens)


@pytest.mark.parametrize(("mute", "visits"), [(False, [16, 4]), (True, [10, 10])], ids=["PUCT", "UCT"])
async def test_where_nothing_is_earned_visits_follow_the_prior_if_all_have_one(mute: bool, visits: list[int]):
    world = GridEnvironment()
    tree = await opened(world)
    options = MCTSOptions(num_simulations=20, num_branches=2, value="none", depth=1)
    await MCTSStrategy(options).decide(tree, Biased(mute=mute), world)
    assert [tree.nodes[at].visits for at in tree.children(tree.head)] == visits


def test_selection_by_priors_prefers_what_the_policy_prefers_until_returns_are_known():
    assert best_arm([Arm(0, 0.0, 0.2), Arm(0, 0.0, 0.8)], 1.0) == 1
    assert best_arm([Arm(5, 0.9, 0.2), Arm(5, 0.1, 0.8)], 1.0) == 0
    assert best_arm([Arm(1, 0.5, 0.5), Arm(0, 0.0, None)], 1.0) == 1, "without all priors it is UCT"
    assert priors([0.0, math.log(3)]) == pytest.approx([0.25, 0.75])
    assert [width(visits, 2, 0.5, 6) for visits in (0, 1, 4, 9, 100)] == [2, 2, 4, 6, 6]
