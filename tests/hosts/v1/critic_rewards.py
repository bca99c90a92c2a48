"""Rewards for critics: one that counts, and some that do not do what they should."""

from __future__ import annotations

import asyncio
import time

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
    """Takes ``seconds``; when it ``blocks``, nothing else on its loop goes on."""

    version = "slow-1"

    def __init__(self, seconds: float = 60.0, blocks: bool = False) -> None:
        self._seconds, self._blocks = seconds, blocks

    async def __call__(self, trajectory: Trajectory) -> Score:
        if self._blocks:
            time.sleep(self._seconds)
        await asyncio.sleep(self._seconds)
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
