"""Rewards for critics: one that counts, and some that do not do what they should."""

from __future__ import annotations

import asyncio

from openhands_rl_plugin.core.types import Score, Trajectory


def score_of(trajectory: Trajectory, reward: float | None, version: str) -> Score:
    return Score(trajectory_id=trajectory.id, reward=reward, reward_version=version)


class ShareOfThree:
    """A third for each call of the tool ``name``."""

    def __init__(self, name: str = "finish") -> None:
        self._name = name
        self.version = f"thirds-1@{name}"

    async def __call__(self, trajectory: Trajectory) -> Score:
        calls = [call for node in trajectory.sampled() for call in node.message.tool_calls if call.name == self._name]
        return score_of(trajectory, min(1.0, len(calls) / 3), self.version)


class Slow:
    """Takes a minute."""

    version = "slow-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        await asyncio.sleep(60)
        return score_of(trajectory, 1.0, self.version)


class Broken:
    """Raises what it is asked to, or gives a reward of no use."""

    version = "broken-1"

    def __init__(self, reward: float | None = None, error: str = "") -> None:
        self._reward, self._error = reward, error

    async def __call__(self, trajectory: Trajectory) -> Score:
        if self._error:
            raise ValueError(self._error)
        return score_of(trajectory, self._reward, self.version)
