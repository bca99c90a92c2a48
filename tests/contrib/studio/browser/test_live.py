"""What happens while a page is open appears on it; an exported page opens from a file, without a network."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browser import missing_browser
from seeded_run import seed_run
from studio_pages import Pages, pages_of

from openhands_rl_plugin.contrib.studio.sources import sources_at
from openhands_rl_plugin.core.records import EpisodeStart
from openhands_rl_plugin.core.types import StopReason, Trajectory
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SOON = 10
"""Seconds, on a machine that does other things too; the benchmark measures how long it takes."""


def play(folder: Path, episode: Trajectory) -> None:
    async def add() -> None:
        async with FileTrajectoryStorage(folder) as storage:
            if episode.stop is StopReason.UNFINISHED:
                await storage.begin(EpisodeStart.of(episode))
            else:
                await storage.add(episode)

    with ThreadPoolExecutor(1) as thread:  # Playwright runs a loop in this thread
        thread.submit(asyncio.run, add()).result()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    if missing := missing_browser():
        pytest.skip(f"THE STUDIO'S PAGES ARE NOT TESTED: {missing}")
    folder = tmp_path_factory.mktemp("live")
    play(folder / "night" / "trajectories", sample_episode("first", run="night"))
    seed_run(folder, steps=40)
    with pages_of(sources=sources_at([str(folder / "night")])) as opened:
        opened.folder = folder / "night"
        yield opened


def test_an_episode_that_ends_appears_in_the_list(pages: Pages) -> None:
    page = pages.open("/", wait=".row:not(.head) a")
    play(pages.folder / "trajectories", sample_episode("second", run="night", finished=3000.0))
    page.get_by_text("second", exact=True).wait_for(timeout=SOON * 1000)
    pages.keys("j")
    play(pages.folder / "trajectories", sample_episode("third", run="night", finished=4000.0))
    page.get_by_text(re.compile(r"\d changes?, show")).wait_for(timeout=SOON * 1000)
    assert page.get_by_text("third", exact=True).count() == 0, "rows do not move below somebody who chose one"
    pages.keys("r")
    page.get_by_text("third", exact=True).wait_for(timeout=SOON * 1000)


def test_a_curve_grows_with_its_file(pages: Pages) -> None:
    page = pages.open("/r/night", wait=".curve canvas")
    assert page.get_by_text("40 points").count() == 1
    file = sorted(pages.folder.glob("trainer/*/metrics.jsonl"))[-1]
    with file.open("a") as opened:
        opened.write('{"step": 40, "loss": 0.01}\n')
    page.get_by_text("41 points").wait_for(timeout=SOON * 1000)


@pytest.mark.slow
def test_an_export_opens_from_a_file_and_asks_nobody(pages: Pages, tmp_path: Path) -> None:
    page = pages.open("/", wait=".row:not(.head) a")
    pages.keys("j", "x")
    with page.expect_download() as waited:
        page.get_by_text("Export", exact=True).click()
    file = tmp_path / "episodes.html"
    waited.value.save_as(file)
    offline = pages.anew(offline=True)
    asked: list[str] = []
    offline.on("request", lambda request: asked.append(request.url))
    offline.goto(file.as_uri())
    offline.wait_for_selector(".row:not(.head) a")
    pages.keys("j", "Enter")
    offline.wait_for_selector(".item.assistant .call")
    pages.keys("o")
    offline.wait_for_selector(".t")
    pages.problems[:] = [each for each in pages.problems if not each.startswith("asked for file:")]
    assert [each for each in asked if not each.startswith(("file:", "data:"))] == [] and not pages.violations()
    pages.anew()
