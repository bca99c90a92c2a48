"""The gradient of searched episodes against the exact one, in a world whose every outcome can be listed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from credited_episodes import settings

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Message,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)
from openhands_rl_plugin.rollout.strategies.base import BestOfNOptions, BestOfNStrategy
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.training.algorithms import credited_samples, times_sampled
from openhands_rl_plugin.training.losses import batch_weights, samples_from_rollouts

WAYS = 3
TASK = Task(id="plan", environment="planning")
POLICY = {"": (0.5, 0.2, 0.3), "0": (0.2, 0.2, 0.6), "1": (0.7, 0.1, 0.2), "2": (0.1, 0.8, 0.1)}
"""By the way there, ``"2"`` after way 2: the probability of each way."""


def finished(tree: EpisodeTree, name: str = "one") -> Trajectory:
    return tree.freeze(
        EpisodeRequest(task=TASK, run_id="run", group_id="group"),
        trajectory_id=name,
        strategy=StrategySpec(name="BestOfN"),
        policy=PolicyRef(base_model="scripted"),
        stop=StopReason.TERMINATED,
        times=Times(started=0.0, finished=1.0),
    )


async def rolled_out(proposals: Sequence[int], later: Sequence[int] = (), **options: object) -> Trajectory:
    """The first turn by best-of-n with these proposals; ``later[way]`` is what a rollout goes on with after ``way``."""
    world = PlanningEnvironment(PlanningOptions(seed=3, depth=2 if later else 1, branching=WAYS))
    first = iter(proposals)

    def reply(messages: Sequence[Message]) -> str:
        way = (messages[-1].content or "").removeprefix("You came by ").removesuffix(".")
        return str(next(first) if way == "nowhere" else later[int(way)])

    strategy = BestOfNStrategy(BestOfNOptions(n=len(proposals), **options))  # type: ignore[arg-type]
    tree = EpisodeTree()
    tree.observe(await world.reset(TASK))
    tree.commit(await strategy.decide(tree, ScriptedEngine(reply), world))
    tree.observe(await world.step(tree.action))
    return finished(tree)


def score(way: int) -> torch.Tensor:
    """The gradient of the log-probability of ``way`` at the root with respect to the root's logits."""
    return torch.eye(WAYS, dtype=torch.float64)[way] - torch.tensor(POLICY[""], dtype=torch.float64)


def estimate(trajectories: Sequence[Trajectory], **changes: object) -> torch.Tensor:
    """The ascent direction of the batch's loss at the root, from its samples, advantages and weights."""
    chosen = settings(**changes)
    samples = credited_samples(trajectories, [each.episode_return for each in trajectories], chosen)
    total = torch.zeros(WAYS, dtype=torch.float64)
    if not samples:
        return total
    items = samples_from_rollouts(samples)
    for item, weight in zip(items, batch_weights(items, chosen).tolist(), strict=True):
        for at in item.positions[::2]:  # the way, and the end of the message
            total += 2 * weight * item.sample.advantage_at(at) * score(item.sample.input_ids[at] - ord("0"))
    return total


def exact(worth: Callable[[int], float]) -> torch.Tensor:
    """The gradient of the expected worth of one way that is sampled from the policy."""
    return torch.stack([POLICY[""][way] * worth(way) * score(way) for way in range(WAYS)]).sum(0)


def rewarded(*path: int, depth: int) -> float:
    return PlanningEnvironment(PlanningOptions(seed=3, depth=depth, branching=WAYS)).worth(path)


async def test_the_gradient_over_proposals_is_exact_in_expectation_and_that_of_the_path_is_not() -> None:
    trees = [
        (math.prod(POLICY[""][way] for way in ways), await rolled_out(ways, value="none"))
        for ways in itertools.product(range(WAYS), repeat=3)
    ]
    assert any(max(times_sampled(tree).values()) == 2 for _, tree in trees), "merged ones are among them"
    for _, tree in trees:
        taught = credited_samples([tree], [0.0], settings(algorithm="opd", teacher="t"))
        assert sum(each.count * sum(each.mask) for each in taught) == 6, (
            "a teacher sees each as often as it was sampled"
        )
    true = exact(lambda way: rewarded(way, depth=1))
    for algorithm, scale in (("rloo", 1.0), ("dr-grpo", 2 / 3)):
        found = sum(p * estimate([tree], algorithm=algorithm, tree="proposals") for p, tree in trees)
        torch.testing.assert_close(found, scale * true, rtol=0, atol=1e-7)
    path = sum(p * q * estimate([a, b], algorithm="rloo") for (p, a), (q, b) in itertools.product(trees, trees))
    assert isinstance(path, torch.Tensor)
    assert torch.nn.functional.cosine_similarity(path, true, dim=0) < 0.9
