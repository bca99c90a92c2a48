"""Tokens that a training noted are coloured by what it computed, and a menu chooses among its epochs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from browser import needs_browser
from studio_pages import pages_of

from openhands_rl_plugin.contrib.studio.command import sources_at
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.training.trainer.note_files import (
    NOTES_FOLDER,
    NotedSample,
    NotedTraining,
    NoteFile,
    frame_bytes,
)
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = [needs_browser, pytest.mark.slow]
COLUMNS = ("trainer", "entropy", "advantage", "clipped")


def test_the_page_colours_by_what_a_training_noted(tmp_path: Path) -> None:
    async def fill() -> None:
        async with FileTrajectoryStorage(tmp_path / "store") as storage:
            await storage.add(sample_episode("one"))

    asyncio.run(fill())
    run = tmp_path / "night.training"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    about = NotedTraining(fingerprint="x", algorithm="grpo", version=6, epochs=2, at=1.78e9)
    file = NoteFile(run / NOTES_FOLDER, about, 0, 0)
    for epoch in (1, 2):
        said = NotedSample(step=epoch, epoch=epoch, episode="one", nodes=((1, 2),), columns=COLUMNS)
        file.append(frame_bytes(said, ((-0.1 - epoch, -0.2), (1.5, 0.5), (0.75, 0.75), (1.0, 0.0))))
    file.close()
    with pages_of(sources=sources_at([str(tmp_path)])) as pages:
        page = pages.open("/e/one?view=tokens&node=1", wait=".t")
        names = page.locator(".strip [aria-pressed]").all_inner_texts()
        assert {"drift", "entropy", "advantage", "clipped"} <= set(names)
        menu = page.get_by_label("Training", exact=True)
        assert menu.locator("option").count() == 2 and "epoch 2 of 2" in menu.locator("option:checked").inner_text()
        page.locator('.t[data-t="1.3"]').hover()
        said = page.locator(".hover").inner_text()
        assert "2.1000" in said and "entropy 1.5" in said and "clipped" in said
        assert "advantage 0.75" in said
        menu.select_option(index=0)
        page.wait_for_function("() => location.search.includes('notes=')")
        page.locator(".stream").wait_for()
        page.locator('.t[data-t="1.4"]').hover()
        page.locator('.t[data-t="1.3"]').hover()
        page.wait_for_function("() => /trainer .1\\.1/.test(document.querySelector('.hover').textContent)")
        assert pages.problems + pages.violations() == []
