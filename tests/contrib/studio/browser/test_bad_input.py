"""What is damaged, empty or closed is said in words on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import needs_browser
from studio_pages import pages_of

from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME

pytestmark = [needs_browser, pytest.mark.slow]


def test_no_store_and_nothing_else_is_said_on_every_page(tmp_path: Path) -> None:
    with pages_of(sources=StudioSources({})) as pages:
        for address in ("/", "/r", "/a", "/v", "/q", "/c", "/e/x", "/g/x"):
            page = pages.open(address, wait=".problem, .empty")
            assert len(page.locator("main").inner_text()) > 20, address


def test_a_damaged_store_says_so_and_what_helps(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(b"SQLite format 3\0" + b"\xff" * 8000)
    with pages_of(folder) as pages:
        page = pages.open("/", wait=".problem")
        assert FILE_NAME in page.locator(".problem").first.inner_text()


def test_a_browser_without_a_session_is_shown_the_way_in(tmp_path: Path) -> None:
    with pages_of(tmp_path / "store") as pages:
        link = pages.studio.link
        pages.page.context.clear_cookies()
        page = pages.open("/", wait="input[name=secret]")
        page.fill("input[name=secret]", link)
        pages.keys("Enter")
        page.wait_for_selector(".strip, .empty:not(:has(form))")
        assert page.locator("input[name=secret]").count() == 0
