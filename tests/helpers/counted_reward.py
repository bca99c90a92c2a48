"""A reward for a tiny random model, which counts how often it was asked about each episode."""

from __future__ import annotations

from collections import Counter

from shopping_loop import VowelReward

from openhands_rl_plugin.core.types import Score, Trajectory

ASKED: Counter[str] = Counter()


class CountedReward(VowelReward):
    """The share of vowels in the answers."""

    version = "counted-vowels-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        ASKED[trajectory.id] += 1
        return (await super().__call__(trajectory)).model_copy(update={"reward_version": self.version})
