"""What a studio shows, by name: stores, runs, evaluations and folders of adapters."""

from __future__ import annotations

import asyncio
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.trajectories.query.text_index import TextIndex

_PAUSE = 2.0
"""Seconds between two looks for what has come."""


class Growing[Value](UserDict[str, Value]):
    """Names to which others may be added while somebody goes through them."""

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self.data))


@dataclass(frozen=True)
class StudioSources:
    """Name -> store, or folder. The first store is meant where a request names none. ``indexes``: of the stores
    in which texts are searched. ``look_again`` adds what has come since, from a thread; ``waiting``: the folders
    in which nothing has been found so far.
    """

    stores: Mapping[str, TrajectoryStorage] = field(default_factory=dict)
    runs: Mapping[str, Path] = field(default_factory=dict)
    evaluations: Mapping[str, Path] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    indexes: Mapping[str, TextIndex] = field(default_factory=dict)
    look_again: Callable[[], None] | None = None
    waiting: Callable[[], Sequence[str]] = tuple[str, ...]

    def store(self, request: Request) -> TrajectoryStorage:
        """The store of ``?store=``, or the first one. Raises ``HTTPException`` 404 and ``ConfigError``."""
        name = request.query_params.get("store")
        if not self.stores:
            if names := ", ".join(self.waiting()):
                raise HTTPException(404, f"{names}: nothing is stored there yet; it is shown as soon as it is")
            raise HTTPException(404, "no store is open; start the studio with the folder of one")
        if name is None or name == "":
            return next(iter(self.stores.values()))
        if name not in self.stores:
            raise ConfigError(unknown_name("store", name[:80], self.stores))
        return self.stores[name]

    async def holding(self, request: Request, identity: str) -> TrajectoryStorage:
        """The store that has an episode, by default any of them. Raises ``HTTPException`` 404."""
        named = request.query_params.get("store")
        for storage in [self.store(request)] if named else self.stores.values():
            if await storage.count(TrajectoryFilter(ids=(identity,), finished=None)):
                return storage
        raise HTTPException(404, f"no store has the episode {identity[:80]!r}")

    @staticmethod
    def folder(request: Request, folders: Mapping[str, Path], what: str) -> Path:
        """The folder that the path names. Only names are looked up, so that none leads elsewhere. Raises
        ``HTTPException`` 404."""
        name = request.path_params["id"]
        if name not in folders:
            raise HTTPException(404, unknown_name(what, name[:80], folders))
        return folders[name]

    def names(self) -> tuple[tuple[str, ...], ...]:
        """What there is of each kind."""
        return tuple(tuple(each) for each in (self.stores, self.runs, self.evaluations, self.adapters))

    async def watch(self) -> None:
        """Look again and again for what has come, for less than a hundredth of a processor."""
        while self.look_again is not None:
            await asyncio.sleep(max(_PAUSE, 100 * await asyncio.to_thread(_timed, self.look_again)))

    async def close(self) -> None:
        """Close every store."""
        for storage in self.stores.values():
            await storage.close()


def _timed(call: Callable[[], None]) -> float:
    """Seconds of the processor that a call took."""
    started = time.thread_time()
    call()
    return time.thread_time() - started
