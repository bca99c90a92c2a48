"""A real browser without a window, where there is one: what a page does when it is opened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def missing_browser() -> str:
    """Why no page can be opened; empty where one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if PROGRAM else "there is no Chromium (Debian: apt-get install chromium)"


needs_browser = pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "there")


class Seen:
    """A page that was opened: its text, what it asked for, what it said, and the page itself."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.said: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.said.append(message.text))
        page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))

    def open(self, file: Path) -> str:
        """Open a file, touch everything in it, and return its text."""
        self.page.goto(file.as_uri(), wait_until="load")
        for element in self.page.query_selector_all("body *"):
            element.dispatch_event("mouseover")
            element.dispatch_event("focus")
            element.dispatch_event("click")
        self.page.wait_for_timeout(200)
        return self.page.inner_text("body")


@contextmanager
def opened() -> Iterator[Seen]:
    """A page of a new browser."""
    from playwright.sync_api import sync_playwright

    alone = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=PROGRAM, args=alone)
        try:
            yield Seen(browser.new_page())
        finally:
            browser.close()
