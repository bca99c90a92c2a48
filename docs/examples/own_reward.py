"""A reward of your own: the share of tests that pass, and a little less for long episodes.

    python own_reward.py TRAJECTORIES     scores every episode of a store; run it again whenever the reward changes

It reads what the reward ``command`` stored as evidence ([rl.reward] name = "command", command = "pytest -q").
To train with it:  openhands-rl train TRAJECTORIES --model DIR --reward own_reward:Share
"""

from __future__ import annotations

import asyncio
import re
import sys

from openhands_rl_plugin import FileTrajectoryStorage, Frozen, Score, Trajectory
from openhands_rl_plugin.core.errors import GraderError


class Options(Frozen):
    """``price``: what a turn costs."""

    price: float = 0.01


class Share:
    """Passed tests / all tests - price * turns, and never below 0."""

    Options = Options

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    @property
    def version(self) -> str:
        """Other prices give other scores."""
        return f"share-1@{self.options.price:g}"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ``GraderError`` where no tests ran: the episode then stays unscored."""
        if trajectory.failure is not None:
            raise GraderError(f"{trajectory.id} failed: {trajectory.failure.message}")
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", _output(trajectory))}
        if not counts:
            raise GraderError(f"{trajectory.id} has no output of pytest in its evidence")
        share = counts.get("passed", 0) / sum(counts.values())
        reward = max(0.0, share - self.options.price * sum(1 for _ in trajectory.sampled()))
        return Score(trajectory_id=trajectory.id, reward=reward, detail={"share": share}, reward_version=self.version)


def _output(trajectory: Trajectory) -> str:
    """All that the evidence says, as text."""
    return " ".join(str(value) for value in trajectory.evidence.values())


async def score(folder: str) -> None:
    """Append a score to each episode of the store."""
    reward = Share()
    async with FileTrajectoryStorage(folder) as storage:
        async for trajectory, _ in storage.find():
            try:
                judged = await reward(trajectory)
            except GraderError as error:
                print(f"not scored: {error}")
                continue
            await storage.add_scores([judged])
            print(f"{trajectory.id[:8]}: {judged.reward:.2f}")


if __name__ == "__main__":
    asyncio.run(score(sys.argv[1]))
