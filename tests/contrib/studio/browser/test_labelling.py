"""What people say of episodes in the browser is a label in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from studio_pages import Pages

from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def stored(folder: Path, episode: str) -> Sequence[Label]:
    async def read() -> Sequence[Label]:
        async with FileTrajectoryStorage(folder / "store") as storage:
            return await storage.labels([episode])

    # Playwright runs a loop in this thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, read()).result()


def test_keys_of_the_queue_make_labels(pages: Pages, seeded: Path) -> None:
    page = pages.open("/q?contains=fix-cache-v1-", wait=".verdicts")
    page.wait_for_selector(".item.assistant")
    assert not page.query_selector(".reward"), "who judges does not see a grader's verdict"
    pages.keys("m")
    page.keyboard.type("cut too early")
    pages.keys("Enter")
    page.wait_for_function("() => document.querySelector('#remark').value === ''")
    pages.keys("y")
    page.wait_for_function("() => location.search.includes('n=1')")
    page.wait_for_selector(".item.assistant")
    pages.keys("n")
    page.wait_for_function("() => location.search.includes('n=2')")
    labelled = {each.trajectory_id: each for at in range(4) for each in stored(seeded, f"fix-cache-v1-{at}")}
    assert [each.value for each in labelled.values() if each.kind == "verdict"] == [0.0, 1.0]
    assert "cut too early" in [each.text for at in range(4) for each in stored(seeded, f"fix-cache-v1-{at}")]


def test_a_pair_becomes_a_preference(pages: Pages, seeded: Path) -> None:
    page = pages.open("/q?contains=fix-parser-v2-2&pairs=1", wait=".two")
    # Nobody judges what is not there yet: the keys and the buttons wait for both sides.
    page.wait_for_selector(".verdicts button:not([disabled]) >> text=Left is better")
    assert page.locator(".two section:has(.item.assistant)").count() == 2
    left = page.locator(".two section").first.locator(".text.sampled").all_inner_texts()
    pages.keys("1")
    page.wait_for_selector(".empty")
    (label,) = stored(seeded, "fix-parser-v2-2")
    page = pages.open("/e/fix-parser-v2-2", wait=".item.assistant")
    mine = page.locator(".text.sampled").all_inner_texts() == left
    assert label.kind == "preference" and (label.other or "").startswith("fix-parser-v2-")
    assert label.value == (1.0 if mine else 0.0)
