"""A MongoDB server for the whole session, and a database of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from mongodb_server import MongoServer, NoServerError
from pymongo import MongoClient
from pymongo.database import Database

_numbers = itertools.count()


@pytest.fixture(scope="session")
def mongodb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoServer]:
    server = MongoServer(tmp_path_factory.mktemp("mongodb"))
    try:
        server.start()
    except NoServerError as error:
        pytest.skip(f"THE MONGODB STORAGE IS NOT TESTED: {error}")
    yield server
    server.stop()


@pytest.fixture
def database(mongodb: MongoServer) -> Iterator[Database[dict[str, object]]]:
    """What the storage has written, seen by another client."""
    with MongoClient(mongodb.url) as client:
        yield client[f"test_{next(_numbers)}"]
