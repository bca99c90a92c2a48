"""Runs a gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.models.gateway.app import Gateway
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.pool import SessionPool

_LOG = redacting_logger(__name__)
_BACKLOG = 1024
_PATIENCE = 10.0
_LONGEST_PAUSE = 60.0


@asynccontextmanager
async def running_gateway(config: GatewayConfig, storage: TrajectoryStorage) -> AsyncIterator[str]:
    """A gateway in this event loop; yields its URL, without ``/v1``. Afterwards its sessions have ended.

    Raises ``ConfigError`` when it cannot listen and ``StorageError`` when the storage cannot be read or written. The
    storage stays open.
    """
    gateway = Gateway(config, storage)
    with _listen(config) as listener:
        await gateway.sessions.start()
        runner = web.AppRunner(gateway.app(), access_log=None, handle_signals=False, shutdown_timeout=_PATIENCE)
        await runner.setup()
        site = web.SockSite(runner, listener, backlog=_BACKLOG)
        await site.start()
        sweeper = asyncio.create_task(_sweep(gateway.sessions, min(60 * config.idle_minutes / 4, _LONGEST_PAUSE)))
        host, port = listener.getsockname()[:2]
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await runner.cleanup()
            await gateway.sessions.close(_PATIENCE)
            await gateway.aclose()


async def _sweep(sessions: SessionPool, pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        try:
            await sessions.end_idle()
        except StorageError as error:
            # They stay open and are tried again; calls in the meantime tell their clients.
            _LOG.error("idle sessions could not be ended: %s", error)


def _listen(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another --port"
        ) from error
    return listener
