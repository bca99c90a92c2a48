"""Stored episodes as they are asked for; the last few stay open, because a page asks for one in parts."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.browsing.listing import Browsable
from openhands_rl_plugin.core.judgements import labels_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.trajectories.view.episode import SubAgent, sub_agents_of

_KEPT = 4


class Opened(NamedTuple):
    """An episode, what was said of it, and the store that has it; ``revision`` is empty where the store has none."""

    storage: TrajectoryStorage
    revision: str
    trajectory: Trajectory
    scores: tuple[Score, ...]
    labels: tuple[Label, ...]
    sub_agents: tuple[SubAgent, ...]


class EpisodeShelf:
    """Opens episodes of all stores."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._kept: OrderedDict[tuple[int, str], Opened] = OrderedDict()

    async def open(self, request: Request, identity: str | None = None) -> Opened:
        """The episode of the path, or another one. Raises ``HTTPException`` 404 and ``StorageError``."""
        asked = request.path_params["id"] if identity is None else identity
        storage = await self._sources.holding(request, asked)
        revision = await storage.revision(asked) if isinstance(storage, Browsable) else ""
        key = (id(storage), asked)
        known = self._kept.get(key)
        if known is None or not revision or known.revision != revision:
            known = await read_episode(storage, asked, revision)
        self._kept[key] = known
        self._kept.move_to_end(key)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return known


async def read_episode(storage: TrajectoryStorage, identity: str, revision: str = "") -> Opened:
    """An episode of a store. Raises ``HTTPException`` 404 and ``StorageError``."""
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=(identity,), finished=None)):
        labels, begun = await labels_of(storage, [identity]), await sub_agents_of(storage, trajectory)
        return Opened(storage, revision, trajectory, scores, labels, begun)
    raise HTTPException(404, f"no store has the episode {identity[:80]!r}")
