"""The places of an OpenEnv server: each connection is an episode, and a server may allow few of them, often one.

An episode waits for its place. A search takes places for its forks together with the episode's own, all or nothing, so
that it neither begins what it cannot do nor waits, in the middle, for what it holds itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.retry import Backoff
from openhands_rl_plugin.environments.openenv.websocket import NoPlaceError, OpenEnvSession

_LOG = redacting_logger(__name__)
# Connections that a search opens in advance; further ones as it needs them.
_IN_ADVANCE = 8
_TOLD: set[str] = set()


class PlaceWait:
    """One wait for a place: at most ``patience`` seconds, told once for each server."""

    def __init__(self, server: str, patience: float) -> None:
        self._server = server
        self._patience = patience
        self._began = time.monotonic()
        self._backoff = Backoff(0.1, 2.0)
        self._tries = 0

    async def after(self, full: NoPlaceError) -> None:
        """Pause before the next try. Raises ``full`` when the time is over."""
        left = self._patience - (time.monotonic() - self._began)
        if left <= 0:
            raise full
        if self._server not in _TOLD:
            _TOLD.add(self._server)
            _LOG.warning(
                "%s has no free place (%s): episodes wait up to %g s for one (place_timeout)",
                self._server,
                "its limit is not known" if full.most is None else f"{full.most} at a time",
                self._patience,
            )
        self._tries += 1
        await self._backoff.wait(self._tries, at_most=left)


class ForkPlaces:
    """The places for the forks of one episode: idle connections, which a fork takes and gives back.

    ``wanted``: forks that the search holds at a time. ``most`` is how many it may hold; ``None``: as many as it wants.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.most: int | None = None
        self._idle: list[OpenEnvSession] = []
        self._closed = False

    async def fill(self, server: str, connect: Callable[[], OpenEnvSession]) -> None:
        """Open connections. Raises ``NoPlaceError`` where there is none now, ``BadEnvironmentError`` where there never
        is; then nothing is held."""
        while len(self._idle) < min(self.wanted, _IN_ADVANCE):
            session = connect()
            try:
                await session.open()
                with suppress(BadEnvironmentError):  # an environment may have no state before its reset
                    await session.ask("state", answered_by="state")
            except NoPlaceError as full:
                await session.close()
                if self._idle:
                    self.most = len(self._idle)
                    _LOG.warning("%s has room for %d forks; the search wanted %d", server, self.most, self.wanted)
                    return
                if full.most is not None and full.most < 2:
                    raise BadEnvironmentError(
                        f"{server} has one place, and a search needs two at least: the episode's and a fork's (up to "
                        f"{1 + self.wanted} with open_worlds = {self.wanted}); raise the server's max_concurrent_envs, "
                        'or use rollout_strategy = "StandardReAct", which needs no forks'
                    ) from full
                raise
            except BaseException:
                await session.close()
                await self.close()
                raise
            self._idle.append(session)

    def take(self) -> OpenEnvSession | None:
        """A connection that is open, if one is left."""
        while self._idle:
            if (session := self._idle.pop()).alive:
                return session
        return None

    async def give_back(self, session: OpenEnvSession) -> None:
        """Keep a connection for the next fork, unless it broke or the episode is over."""
        if self._closed or not session.alive:
            await session.close()
        else:
            self._idle.append(session)

    async def close(self) -> None:
        """Close what is idle; what is given back later is closed, too."""
        self._closed = True
        idle, self._idle = self._idle, []
        with suppress(EpisodeError):
            await asyncio.gather(*(session.close() for session in idle))
