"""What a studio shows, by name: stores, runs, evaluations and folders of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.trajectories.query.text_index import TextIndex


@dataclass(frozen=True)
class StudioSources:
    """Name -> store, or folder. The first store is meant where a request names none. ``indexes``: of the stores
    in which texts are searched."""

    stores: Mapping[str, TrajectoryStorage] = field(default_factory=dict)
    runs: Mapping[str, Path] = field(default_factory=dict)
    evaluations: Mapping[str, Path] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    indexes: Mapping[str, TextIndex] = field(default_factory=dict)

    def store(self, request: Request) -> TrajectoryStorage:
        """The store of ``?store=``, or the first one. Raises ``HTTPException`` 404 and ``ConfigError``."""
        name = request.query_params.get("store")
        if not self.stores:
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

    async def close(self) -> None:
        """Close every store."""
        for storage in self.stores.values():
            await storage.close()
