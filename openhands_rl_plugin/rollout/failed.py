"""The trajectory of an episode that was not run to its end, because something around it failed."""

from __future__ import annotations

import time

from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    PolicyRef,
    StopReason,
    StrategySpec,
    Times,
    Trajectory,
)


def failed_episode(
    request: EpisodeRequest,
    failure: Failure,
    *,
    strategy: StrategySpec,
    base_model: str,
    started: float,
    unfinished: Trajectory | None = None,
) -> Trajectory:
    """An episode that ended with ``failure``, with what is stored of it. ``started`` is in seconds since the epoch."""
    tree = EpisodeTree() if unfinished is None else EpisodeTree.thaw(unfinished)
    return tree.freeze(
        request,
        trajectory_id=trajectory_id(request),
        strategy=strategy,
        policy=PolicyRef.from_served_name(base_model, request.served_model or base_model),
        stop=StopReason.ERROR,
        times=Times(started=started if unfinished is None else unfinished.times.started, finished=time.time()),
        failure=failure,
    )
