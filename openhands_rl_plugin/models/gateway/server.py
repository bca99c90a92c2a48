"""Runs a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers.connections import ConnectionLimits, Connections
from openhands_rl_plugin.core.servers.listening import BACKLOG, listening, url_of
from openhands_rl_plugin.models.engines.extensions import Clock
from openhands_rl_plugin.models.gateway.app import Gateway
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.guard import library_logger
from openhands_rl_plugin.models.gateway.sessions import SessionPool

_LOG = redacting_logger(__name__)
_SHUTDOWN_SECONDS = 10.0
_MAX_SWEEP_SECONDS = 60.0


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig,
    storage: TrajectoryStorage,
    clock: Clock = time.monotonic,
    *,
    limits: ConnectionLimits | None = None,
) -> AsyncIterator[str]:
    """A gateway in this event loop; yields its URL, without ``/v1``. All sessions are ended on exit.

    ``clock``: seconds, for when a field that a model refused is tried again.

    Raises ``PortUnavailableError``, and ``StorageError`` when the storage cannot be read or written. The storage stays
    open.
    """
    connections = Connections(limits)
    gateway = Gateway(config, storage, clock, connections=connections)
    with listening(config.host, config.port) as listener:
        await gateway.sessions.start()
        runner = web.AppRunner(
            gateway.app(),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            keepalive_timeout=connections.limits.idle,
            logger=library_logger(),
            auto_decompress=False,
        )
        await runner.setup()
        assert runner.server is not None, "it was set up"
        # Not a site of the runner's: that has no place for what bounds the connections.
        accepting = await asyncio.get_running_loop().create_server(
            connections.bounded(runner.server), sock=listener, backlog=BACKLOG
        )
        sweeper = asyncio.create_task(_sweep(gateway.sessions, min(60 * config.idle_minutes / 4, _MAX_SWEEP_SECONDS)))
        try:
            yield url_of(listener)
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            accepting.close()
            await runner.cleanup()
            await gateway.sessions.close(_SHUTDOWN_SECONDS)
            await gateway.aclose()


async def _sweep(sessions: SessionPool, pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        try:
            await sessions.end_idle()
        except StorageError as error:
            # They stay open until the next attempt; requests in the meantime get the error.
            _LOG.error("idle sessions could not be ended: %s", error)
