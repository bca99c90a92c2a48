"""One damaged episode among good ones: the list and the others are as before, and it says what helps."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from studio_client import Client
from train_store import store_of

from openhands_rl_plugin.testing.storage import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, FileTrajectoryStorage


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three episodes of a group; the nodes of the second are no nodes."""

    store_of(tmp_path, *map(sample_episode, ("before", "broken", "after")))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute(
            "UPDATE chunks SET nodes = x'00ff00ff' WHERE episode = (SELECT row FROM episodes WHERE id = 'broken')"
        )
    return tmp_path


def test_the_api_answers_for_the_others(store: Path, client: Client) -> None:
    browser = client(FileTrajectoryStorage(store))
    assert browser.get("/api/episodes").json()["rows"]["id"] == ["after", "broken", "before"]
    assert browser.get("/api/facets").json()["facets"]["stop"][0]["count"] == 3
    for name in ("before", "after"):
        assert browser.get(f"/api/episodes/{name}").status_code == 200
    for path in ("", "/nodes", "/nodes/1/tokens"):
        answer = browser.get(f"/api/episodes/broken{path}")
        assert answer.status_code == 503, path
        assert "broken" in answer.json()["error"]["message"] and "damaged" in answer.json()["error"]["message"]
    assert browser.get("/api/export?ids=before,after").status_code == 200
    assert browser.get("/api/episodes/after").status_code == 200, "and afterwards, too"
