"""The studio of a run that goes on: its link comes first, and nothing of it keeps the run from going on or ending."""

from __future__ import annotations

import argparse
import re
import resource
import sys
from pathlib import Path

import httpx
import pytest

from openhands_rl_plugin.cli.jobs import studio_beside
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.testing.storage import sample_episode
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

WANTED = argparse.Namespace(no_studio=False)


def link_in(said: str) -> str:
    found = re.search(r"watch it in the studio: (http://127\.0\.0\.1:\d+/\?token=[\w-]+) ", said)
    assert found is not None, said
    return found[1]


async def test_a_run_that_has_not_begun_is_watched_from_its_first_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "night"
    run.mkdir()
    store = run / "trajectories"
    with studio_beside(WANTED, run, lambda: FileTrajectoryStorage(store), run / "adapters", tmp_path / "no-model"):
        link = link_in(capsys.readouterr().out)
        base = link.partition("/?")[0]
        async with httpx.AsyncClient(base_url=base, follow_redirects=True) as browser:
            assert (await browser.get("/api/runs")).status_code == 401
            assert (await browser.get(link)).status_code == 200
            assert [each["name"] for each in (await browser.get("/api/runs")).json()["runs"]] == ["night"]
            assert (await browser.get("/api/runs/night")).json()["records"] == []
            assert (await browser.get("/api/episodes")).json()["total"] == 0
            assert (await browser.get("/api/adapters")).json()["folders"] == [{"name": "night", "adapters": []}]
            record = StageRecord(name="evaluate-base", adapter=None, metrics={}, started=1.0, finished=2.0)
            LoopState(records=(record,)).save(run / "state.json")
            async with FileTrajectoryStorage(store) as storage:
                await storage.add(sample_episode("first"))
            assert (await browser.get("/api/episodes")).json()["total"] == 1
            assert (await browser.get("/api/runs/night")).json()["stage"] == "evaluate-base"
    with pytest.raises(httpx.ConnectError):
        httpx.get(base)


def test_who_wants_none_gets_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with studio_beside(argparse.Namespace(no_studio=True), tmp_path, lambda: FileTrajectoryStorage(tmp_path), tmp_path):
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("lacking", ["socket", "package", "store"])
def test_what_a_studio_lacks_is_one_line_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    from openhands_rl_plugin.contrib.studio import server

    assert server, "imported before files run out"

    def storage() -> FileTrajectoryStorage:
        if lacking == "store":
            raise ConfigError("[rl.storage] uri_env: not set")
        return FileTrajectoryStorage(tmp_path)

    if lacking == "package":
        monkeypatch.setitem(sys.modules, "uvicorn", None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if lacking == "socket":
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with studio_beside(WANTED, tmp_path, storage, tmp_path):
            went_on = True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    said = capsys.readouterr().out
    assert went_on and said.startswith("no studio: ") and said.endswith("the run goes on without it\n")
    assert said.count("\n") == 1
