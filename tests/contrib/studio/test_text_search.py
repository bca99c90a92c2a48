"""Texts and breaks are found: by the page, by a query, by the commands; the index is a cache."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from studio_client import Client, Opener, fill

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.types import Message, Node, Tokens, Trajectory
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.query.text_index import TextIndex
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def saying(identity: str, text: str, *, broken: bool = False) -> Trajectory:
    sample = sample_episode(identity)
    nodes = [*sample.nodes, Node(parent=5, message=Message(role="user", content=text))]
    if broken:
        tokens = Tokens(prompt_ids=(1, 2, 9, 3, 4, 5), sampled_ids=(6,), logprobs=(-0.5,))
        nodes[4] = nodes[4].model_copy(update={"tokens": tokens})
    return sample.model_copy(update={"nodes": tuple(nodes), "head": 6})


def test_a_text_is_found_where_it_stands(opener: Opener, client: Client, tmp_path: Path) -> None:
    fill(opener, [saying("one", "cat: x: No such file or directory"), saying("two", "nothing", broken=True)])
    index = TextIndex(tmp_path / "cache" / "index.sqlite")
    browser = client(sources=StudioSources({"store": opener()}, indexes={"store": index}))
    found = looked_through(browser, 2)
    (hit,) = found["hits"]
    assert (found["total"], hit["id"], hit["node"], hit["match"]) == (1, "one", 6, "No such file")
    assert hit["before"] == "cat: x: " and found["indexed"] == {"done": 2, "total": 2}
    for query, ids in (
        ('"No such file"', ["one"]),
        ('-"No such file"', ["two"]),
        ("break:generation_prompt", ["two"]),
        ("-break:*", ["one"]),
        ("such reward:0.5", ["one"]),
        ('"file such"', None),
        ("!!!", None),
    ):
        assert browser.get("/api/episodes", params={"q": query}).json()["rows"].get("id") == ids, query
    fill(opener, [saying("three", "No such file, too")])
    assert looked_through(browser, 3)["total"] == 2


def test_what_is_indexed_while_a_question_is_answered_is_not_said_to_be_in_the_answer(
    opener: Opener, client: Client, tmp_path: Path
) -> None:
    class Hurried(TextIndex):
        async def having(self, text: str) -> Collection[str]:
            found = await super().having(text)
            self.done += 1
            return found

    fill(opener, [saying("one", "cat: x: No such file")])
    index = Hurried(tmp_path / "index.sqlite")
    browser = client(sources=StudioSources({"store": opener()}, indexes={"store": index}))
    assert browser.get("/api/search", params={"text": "no such"}).json()["indexed"]["done"] == 1
    index.done = 1
    assert browser.get("/api/episodes", params={"q": '"no such"'}).json()["indexed"]["done"] == 1


def looked_through(browser: TestClient, many: int) -> dict:
    """The answer when so many episodes are in the index."""
    end = time.monotonic() + 60
    while (found := browser.get("/api/search", params={"text": "no SUCH file"}).json())["indexed"]["done"] < many:
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


async def test_an_index_that_is_damaged_or_of_another_store_is_made_anew(tmp_path: Path) -> None:
    storage, file = FileTrajectoryStorage(tmp_path / "store"), tmp_path / "index.sqlite"
    await storage.add(saying("one", "needle"))
    for identity, damage in (("a", b""), ("a", b"garbage" * 1000), ("b", None)):
        if damage is not None:
            file.write_bytes(damage)
        index = TextIndex(file, identity)
        await index.update(storage)
        assert list(await index.having("needle")) == ["one"]
    assert file.stat().st_mode & 0o777 == 0o600 or damage is None
    await storage.close()


def test_commands_take_the_same_query(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    episodes = [saying("one", "needle"), saying("two", "hay"), saying("six", "hay")]
    fill(lambda: FileTrajectoryStorage(tmp_path / "s"), episodes)
    store = str(tmp_path / "s")
    assert main(["list", store, "--json", "--query", "-needle id:*o* sort:-stored"]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["two"]
    assert main(["stats", store, "--json", "--query", "needle"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["episodes"] == 1
    out = str(tmp_path / "rows.jsonl")
    assert main(["export", store, "--format", "trajectories", "--out", out, "--query", "id:two|six"]) == 0
    assert "2 trajectories" in capsys.readouterr().out
    assert main(["list", store, "--query", "rum:demo"]) == 1
    assert "did you mean 'run'" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert main(["studio", "export", store, "--query", "needle", "--out", str(page)]) == 0
    assert "1 episodes" in capsys.readouterr().out and "importmap" in page.read_text()
    assert main(["studio", store, "--query", "needle"]) == 1 and "studio export" in capsys.readouterr().err
