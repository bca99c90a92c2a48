"""What a state is worth: unknown is not nothing, several looks make a mean, and who judges an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest
from search_worlds import EveryWayEngine, opened, report

from evaluation.performance.search.planning import PlanningEnvironment
from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.search import SearchBudget
from openhands_rl_plugin.rollout.strategies.value import RewardValue, ValueFunction, VerifierValue

Make = Callable[[ValueFunction], Strategy]

EVERY = pytest.mark.parametrize(
    "make",
    [
        lambda value: BestOfNStrategy(n=3, value=value),
        lambda value: ToTStrategy(num_branches=3, depth=2, beam=3, value=value),
        lambda value: MCTSStrategy(
            num_simulations=24, first_branches=3, num_branches=3, depth=2, decide_by="value", value=value
        ),
    ],
    ids=["BestOfN", "ToT", "MCTS"],
)


class Liking:
    """A verifier that likes one first move, and cannot judge some."""

    version = "liking-1"

    def __init__(
        self,
        liked: str,
        unknown: str = "",
        broken: str = "",
        odd: Mapping[str, float] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.liked, self.unknown, self.broken, self.odd, self.seconds = liked, unknown, broken, odd or {}, seconds
        self.judged = 0

    async def __call__(self, trajectory: Trajectory) -> Score:
        first = next(trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled)
        said = first.message.content or ""
        self.judged += 1
        await asyncio.sleep(self.seconds)
        if said == self.broken:
            raise GraderError("the verifier is away")
        reward = None if said == self.unknown else 0.9 if said == self.liked else self.odd.get(said, 0.0)
        return Score(trajectory_id=trajectory.id, reward=reward, reward_version=self.version)


class Unpaid(PlanningEnvironment):
    """Pays nothing at all."""

    def worth(self, path: tuple[int, ...]) -> float:
        return 0.0


@EVERY
@pytest.mark.parametrize("kind", [RewardValue, VerifierValue])
async def test_what_cannot_be_judged_has_no_value(make: Make, kind: type[RewardValue] | type[VerifierValue]):
    liking = Liking("2", unknown="0", broken="1")
    value = RewardValue(reward=liking) if kind is RewardValue else VerifierValue(verifier=liking)
    world = Unpaid()
    tree = await opened(world)
    chosen = await make(value).decide(tree, EveryWayEngine(), world)
    known = {tree.nodes[at].message.content: tree.nodes[at] for at in tree.children(tree.head)}
    assert [(known[way].visits, known[way].value) for way in "01"] == [(0, None)] * 2
    assert tree.nodes[chosen].message.content == "2" and known["2"].value == pytest.approx(0.9)
    told = report(tree, chosen)
    assert isinstance(told["unjudged"], int) and told["unjudged"] >= 2
    assert told["last_failure"] == "GraderError: the verifier is away"


@pytest.mark.parametrize("kind", [RewardValue, VerifierValue])
async def test_a_judgement_is_bounded_by_the_seconds_of_a_budget(kind: type[RewardValue] | type[VerifierValue]):
    slow = Liking("1", seconds=20.0)
    value = RewardValue(reward=slow) if kind is RewardValue else VerifierValue(verifier=slow)
    world = Unpaid()
    tree = await opened(world)
    started = time.monotonic()
    strategy = BestOfNStrategy(n=2, value=value, turn_budget=SearchBudget(seconds=0.3))
    chosen = await strategy.decide(tree, EveryWayEngine(), world)
    assert time.monotonic() - started < 10
    assert report(tree, chosen)["cut_by"] == "seconds" and report(tree, chosen)["unjudged"] == 2
