"""The studio's pages in a real browser that hears nothing but this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import PROGRAM

from openhands_rl_plugin.contrib.studio.access import StudioConfig
from openhands_rl_plugin.contrib.studio.server import RunningStudio, running_studio
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => {
  violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


class Pages:
    """A browser that is signed in. ``problems``: whatever the pages complained of, or asked another host for.

    ``folder``: of what is shown, for tests that change it.
    """

    def __init__(self, studio: RunningStudio, browser: Any) -> None:
        self.studio = studio
        self.problems: list[str] = []
        self.folder = Path()
        self._browser = browser
        self._context: Any = None
        self.page: Any = None
        self.anew()

    def anew(self, **options: Any) -> Any:
        """Another window, with options of Playwright's ``new_context``; the session stays."""
        state = None if self._context is None else self._context.storage_state()
        if self._context is not None:
            self._context.close()
        self._context = self._browser.new_context(base_url=self.studio.url, storage_state=state, **options)
        self.page = self._context.new_page()
        self.page.add_init_script(_WATCH)
        self.page.on("console", lambda note: note.type in ("error", "warning") and self.problems.append(note.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._asked)
        if state is None:
            self.page.goto(self.studio.link)
        return self.page

    def open(self, address: str, *, wait: str = "main h1, main h2") -> Any:
        """Go to an address of the studio and wait until ``wait`` is there."""
        self.page.goto(address)
        self.page.wait_for_selector(wait, state="attached")
        return self.page

    def keys(self, *keys: str) -> None:
        """Press one key after the other."""
        for key in keys:
            self.page.keyboard.press(key)

    def violations(self) -> list[str]:
        """What the content security policy or Trusted Types stopped on this page."""
        return list(self.page.evaluate("() => window.violations ?? []"))

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.studio.url, "data:")):
            self.problems.append(f"asked for {request.url}")


@contextmanager
def pages_of(*folders: Path, sources: StudioSources | None = None, **options: object) -> Iterator[Pages]:
    """A studio over stores in ``folders``, or ``sources``, and a browser that opened its link."""
    from playwright.sync_api import sync_playwright

    shown = sources or StudioSources({each.name: FileTrajectoryStorage(each) for each in folders})
    config = StudioConfig.model_validate({"port": 0, **options})
    alone = ["--no-sandbox"] if os.geteuid() == 0 else []
    with running_studio(config, shown) as studio, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=PROGRAM, args=[*QUIET, *alone])
        try:
            yield Pages(studio, browser)
        finally:
            browser.close()
