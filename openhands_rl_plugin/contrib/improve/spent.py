"""What a run took, beside what was said before it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from openhands_rl_plugin.contrib.improve.price import Price, hours_in_words
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Frozen, Trajectory
from openhands_rl_plugin.training.loop.facts import EVALUATIONS
from openhands_rl_plugin.training.loop.plan import LoopState

_ROLLOUTS = "rollouts"
"""Where the episodes of an asynchronous loop are, beside those of its stages."""


class RunCost(Frozen):
    """Episodes and tokens as in ``Price``: what was read counts once. ``hours``: of the finished stages, each from its
    last start; rollouts are those with their tests."""

    episodes: int
    evaluations: int
    read: int
    sampled: int
    trained: int
    hours: dict[str, float]

    @property
    def total_hours(self) -> float:
        """Of all stages."""
        return sum(self.hours.values())


async def spent_by(storage: TrajectoryStorage, state: LoopState, run_id: str) -> RunCost:
    """What the finished stages of a run took."""
    episodes = evaluations = read = sampled = 0
    for stage in (*(record.name for record in state.records), _ROLLOUTS):
        async for episode in _episodes(storage, f"{run_id}/{stage}"):
            measured = stage in EVALUATIONS
            evaluations, episodes = evaluations + measured, episodes + (not measured)
            tokens = [node.tokens for node in episode.nodes if node.tokens is not None]
            read += sum(len(each.prompt_ids) for each in tokens)
            sampled += sum(len(each.sampled_ids) for each in tokens)
    training = sum(record.metrics.get("training_seconds", 0.0) for record in state.records)
    whole = sum(record.finished - record.started for record in state.records)
    return RunCost(
        episodes=episodes,
        evaluations=evaluations,
        read=read,
        sampled=sampled,
        trained=int(sum(record.metrics.get("tokens", 0.0) for record in state.records)),
        hours={"rollouts and tests": (whole - training) / 3600, "training": training / 3600},
    )


async def _episodes(storage: TrajectoryStorage, run_id: str) -> AsyncIterator[Trajectory]:
    async for episode, _ in storage.find(TrajectoryFilter(run_id=run_id)):
        yield episode


def spent_lines(spent: RunCost, price: Price) -> list[str]:
    """What was spent of what was said, for a person."""
    hours = ", ".join(f"{name} {hours_in_words(each)}" for name, each in spent.hours.items())
    return [
        "the run took (of what it was said to cost at most)",
        f"  episodes: {spent.episodes:,} to train on, {spent.evaluations:,} to evaluate",
        f"  tokens:   {spent.read:,} of {price.read:,} read, {spent.sampled:,} of {price.sampled:,} sampled, "
        f"{spent.trained:,} of {price.trained:,} trained",
        f"  time:     {hours_in_words(spent.total_hours)} of {hours_in_words(price.total_hours)}: {hours}",
    ]
