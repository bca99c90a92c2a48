"""A candidate in use for a share of the sessions: the routing file of the gateway, and what its sessions were like.

The file follows from the journal, except that a candidate that was decided about leaves it before the line is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.watch.gates import SHARE, SessionCounts, Verdict, share_gate
from openhands_rl_plugin.contrib.watch.judging import EpisodeJudge
from openhands_rl_plugin.contrib.watch.trouble import TROUBLES, trouble_of
from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.gateway.traffic import Routing, read_routing, write_routing

log = redacting_logger(__name__)

_HOUR = 3600.0
_MOST = 1000
"""Sessions of either version that are looked at: the newest ones."""


@dataclass(frozen=True)
class RoutingFile:
    """The file of ``[rl.watch] routing``; without one, nothing is written. Methods raise ``StorageError``, and
    ``ConfigError`` where the file is there and is another one."""

    path: Path | None

    @classmethod
    def of(cls, settings: RLSettings) -> RoutingFile:
        """As the settings name it."""
        named = settings.watch.routing
        return cls(Path(named).expanduser().resolve() if named else None)

    def check(self) -> None:
        """Raise ``ConfigError`` where it could not be written, or is a file of something else."""
        if self.path is None:
            return
        if not self.path.parent.is_dir():
            raise ConfigError(f"[rl.watch] routing: the folder {self.path.parent} does not exist: make it")
        if self.path.exists():
            read_routing(self.path)

    def write(self, routing: Routing) -> None:
        """Say this, unless the file says it."""
        if self.path is not None and (not self.path.exists() or read_routing(self.path) != routing):
            write_routing(self.path, routing)

    def withdraw(self) -> None:
        """Send new sessions to the stable version only. What cannot be written is told; ``follow`` raises it again."""
        try:
            if self.path is not None and self.path.exists():
                self.write(Routing(stable=read_routing(self.path).stable))
        except RLError as error:
            log.warning("%s", error)

    async def follow(self, publisher: AdapterPublisher, stable: Adapter | None) -> None:
        """Send every new session to ``stable``, which is loaded (``None``: the model as requested). Raises
        ``PublishError`` of a server that has to be asked for the version's name and is away."""
        if self.path is None:
            return
        if stable is not None and self.path.exists():
            said = read_routing(self.path)
            if said.stable is not None and f":{said.stable}".endswith(f":{stable.name}"):
                self.write(Routing(stable=said.stable))
                return
        self.write(Routing(stable=await publisher.served_model(stable) if stable is not None else None))

    async def publish(self, publisher: AdapterPublisher, adapter: Adapter) -> None:
        """Bring a version into use, and every new session to it: to a version that is loaded, before the one that it
        replaces is unloaded. Raises ``PublishError``; then version and file are as they were."""
        if self.path is None:
            await publisher.publish(adapter)
            return
        before = read_routing(self.path) if self.path.exists() else Routing()
        await publisher.stage(adapter)
        self.write(Routing(stable=await publisher.served_model(adapter)))
        try:
            await publisher.publish(adapter)
        except RLError:
            self.write(Routing(stable=before.stable))
            raise


class Trial:
    """What the sessions of a candidate and of the version in use were like since it got its share."""

    def __init__(self, settings: RLSettings, storage: TrajectoryStorage, own_run: str) -> None:
        """``own_run``: how the names of the runs begin that the watch plays itself."""
        self._settings = settings
        self._storage = storage
        self._own_run = own_run
        self._judge = EpisodeJudge(settings, storage)
        self._trouble: dict[str, Mapping[str, float]] = {}

    async def verdict(self, candidate: str, used: str, since: float) -> Verdict | None:
        """``None``: too few sessions have ended, and those show nothing. Raises ``StorageError``.

        Args:
            candidate: its versioned name.
            used: that of the version in use; empty for the base model.
            since: when its share began, in Unix seconds.
        """
        watch = self._settings.watch
        after = await self._counts(candidate, since)
        before = await self._counts(used or self._settings.serving.model, since)
        if min(after.sessions, before.sessions) >= watch.share_sessions:
            return share_gate(candidate, after, before, final=True, level=watch.level)
        early = share_gate(candidate, after, before, final=False)
        if not early.passed:
            return early
        if watch.share_hours and time.time() - since >= watch.share_hours * _HOUR:
            fewer = f"{after.sessions} of its sessions and {before.sessions} of the others ended"
            said = f"{candidate} was held back: {fewer} in share_hours = {watch.share_hours:g}"
            return Verdict(SHARE, False, f"{said}, {watch.share_sessions} are needed", {**early.figures})
        return None

    async def _counts(self, served: str, since: float) -> SessionCounts:
        where = TrajectoryFilter(failed=False, since=since)
        ids = [
            each.id
            async for each in self._storage.summaries(where)
            if each.policy.served_name == served
            and each.times.started >= since
            and each.split not in HELD_OUT_SPLITS
            and not each.run_id.startswith(self._own_run)
        ][-_MOST:]
        new = tuple(each for each in ids if each not in self._trouble)
        async for trajectory, _ in self._storage.find(TrajectoryFilter(ids=new)):
            self._trouble[trajectory.id] = trouble_of(trajectory)
        found = [self._trouble[each] for each in ids]
        judged = (await self._judge.judge(ids)).known
        return SessionCounts(
            sessions=len(ids),
            trouble={kind: sum(each[kind] > 0 for each in found) for kind in TROUBLES},
            judged=len(judged),
            good=sum(each.good for each in judged.values()),
        )
