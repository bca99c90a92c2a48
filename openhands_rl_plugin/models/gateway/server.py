"""Runs a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.http_server import listening, url_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.models.engines.extensions import Clock
from openhands_rl_plugin.models.gateway.app import Gateway
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.sessions import SessionPool

_LOG = redacting_logger(__name__)
_SHUTDOWN_SECONDS = 10.0
_MAX_SWEEP_SECONDS = 60.0


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, storage: TrajectoryStorage, clock: Clock = time.monotonic
) -> AsyncIterator[str]:
    """A gateway in this event loop; yields its URL, without ``/v1``. All sessions are ended on exit.

    ``clock``: seconds, for when a field that a model refused is tried again.

    Raises ``PortUnavailableError``, and ``StorageError`` when the storage cannot be read or written. The storage stays
    open.
    """
    gateway = Gateway(config, storage, clock)
    with listening(config.host, config.port) as listener:
        await gateway.sessions.start()
        runner = web.AppRunner(gateway.app(), access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        site = web.SockSite(runner, listener)
        await site.start()
        sweeper = asyncio.create_task(_sweep(gateway.sessions, min(60 * config.idle_minutes / 4, _MAX_SWEEP_SECONDS)))
        try:
            yield url_of(listener)
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
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
