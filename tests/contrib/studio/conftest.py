"""The same episodes in a SQLite store and in MongoDB, and a client of the studio over each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mongodb_server import MongoServer, NoServerError
from starlette.testclient import TestClient
from studio_client import Client, Opener, guarded

from openhands_rl_plugin.contrib.studio.access import COOKIE, StudioConfig, Tickets
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.fixture(scope="session")
def mongodb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoServer]:
    server = MongoServer(tmp_path_factory.mktemp("mongodb"))
    try:
        server.start()
    except NoServerError as error:
        pytest.skip(f"THE STUDIO OVER MONGODB IS NOT TESTED: {error}")
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "mongodb"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same new store again and again."""
    if request.param == "sqlite":
        return lambda: FileTrajectoryStorage(tmp_path / "store")
    server: MongoServer = request.getfixturevalue("mongodb")
    return lambda: MongoDBTrajectoryStorage(server.url, f"studio_{abs(hash(tmp_path)):x}")


@pytest.fixture
def client() -> Iterator[Client]:
    """Makes clients whose browser has opened the link."""
    with ExitStack() as stack:

        def make(*stores: TrajectoryStorage, sources: StudioSources | None = None, **options: object) -> TestClient:
            tickets = Tickets()
            named = sources or StudioSources({f"store {at}": each for at, each in enumerate(stores)})
            app = guarded(StudioConfig.model_validate(options), named, tickets)
            made = TestClient(app, base_url="http://127.0.0.1:8400", headers={"Sec-Fetch-Site": "same-origin"})
            made.cookies.set(COOKIE, tickets.open())
            return stack.enter_context(made)

        yield make
