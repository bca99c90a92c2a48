"""A store, and a client of the studio over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from studio_client import Client, Opener, guarded

from openhands_rl_plugin.contrib.studio.access import COOKIE, StudioConfig, Tickets
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    """Opens the same new store again and again."""
    return lambda: FileTrajectoryStorage(tmp_path / "store")


@pytest.fixture
def client() -> Iterator[Client]:
    """Makes clients whose browser has opened the link."""
    with ExitStack() as stack:

        def make(*stores: TrajectoryStorage, sources: StudioSources | None = None, **options: object) -> TestClient:
            tickets = Tickets()
            named = sources or StudioSources({f"store {at}": each for at, each in enumerate(stores)})
            app = guarded(StudioConfig.model_validate(options), named, tickets)
            made = TestClient(app, base_url="http://127.0.0.1:8400", headers={"Sec-Fetch-Site": "same-origin"})
            made.cookies.set(COOKIE, tickets.cookie)
            return stack.enter_context(made)

        yield make
