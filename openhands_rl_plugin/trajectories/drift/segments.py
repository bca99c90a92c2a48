"""How many segments an episode has, and why: runs of acted turns in which every prompt extends the one before."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.trajectories.drift.breaks import breaks_of
from openhands_rl_plugin.trajectories.drift.causes import cause_of

BEGINNING = "beginning"
"""Why the first segment of every episode begins."""


def segment_causes(trajectory: Trajectory) -> dict[int, str]:
    """First turn of each segment -> why it begins; empty without token ids."""
    starts = [at for at in trajectory.acted() if (tokens := trajectory.nodes[at].tokens) and not tokens.extends]
    if len(starts) < 2:
        return dict.fromkeys(starts, BEGINNING)
    why = {found.node: cause_of(trajectory, found).value for found in breaks_of(trajectory) if found.starts_segment}
    return {at: BEGINNING if number == 0 else why.get(at, "another conversation") for number, at in enumerate(starts)}


async def counting_segments(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]], counts: dict[str, Counter[str]]
) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
    """``found`` as it is; ``counts`` gets the causes of the segments of each episode, by its id."""
    async for trajectory, scores in found:
        counts[trajectory.id] = Counter(segment_causes(trajectory).values())
        yield trajectory, scores
