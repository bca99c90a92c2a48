"""A store that is filled, and the studio's application behind its access check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.testclient import TestClient

from openhands_rl_plugin.contrib.studio.access import StudioConfig, Tickets
from openhands_rl_plugin.contrib.studio.server import build_app
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.servers import GuardMiddleware
from openhands_rl_plugin.core.types import Trajectory

Opener = Callable[[], TrajectoryStorage]
Client = Callable[..., TestClient]


def fill(opener: Opener, episodes: Sequence[Trajectory]) -> None:
    async def store() -> None:
        storage = opener()
        for episode in episodes:
            await storage.add(episode)
        await storage.close()

    asyncio.run(store())


def guarded(config: StudioConfig, sources: StudioSources, tickets: Tickets) -> GuardMiddleware:
    """The application behind its access check, as ``running_studio`` serves it."""
    access = config.access(tickets)
    return GuardMiddleware(
        build_app(config, sources, tickets, access.key), access, max_body_bytes=config.max_body_bytes
    )
