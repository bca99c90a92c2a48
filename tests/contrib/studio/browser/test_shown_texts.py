"""Texts of terminals: colours are colours, and every other code is written out."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import needs_browser
from studio_pages import pages_of
from train_store import store_of

from openhands_rl_plugin.core.types import Message, Node
from openhands_rl_plugin.testing.samples import sample_episode

pytestmark = [needs_browser, pytest.mark.slow]

OUTPUT = (
    "\x1b[1m2 tests\x1b[0m \x1b[32m1 passed\x1b[0m, \x1b[1;31m1 failed\x1b[39;22m, \x1b[38;5;196mplain\x1b[0m "
    "\x1b[2J\x1b[8mhidden\x1b[28m\x1b[33m<b>warned</b>"
)


def test_colours_of_tools_are_shown_and_other_codes_are_written_out(tmp_path: Path) -> None:
    sample, said = sample_episode("one"), Node(parent=5, message=Message(role="user", content=OUTPUT))
    store_of(tmp_path, sample.model_copy(update={"nodes": (*sample.nodes, said), "head": 6}))
    with pages_of(tmp_path) as pages:
        page = pages.open("/e/one", wait="#node-6 pre.text:not(.waits)")
        place = page.locator("#node-6 pre.text")
        assert place.inner_text() == "2 tests 1 passed, 1 failed, plain \\x1b[2Jhidden<b>warned</b>"
        styles = place.locator("span").evaluate_all("all => all.map((each) => [each.className, each.textContent])")
        assert styles == [
            ["strong", "2 tests"],
            ["ansi good", "1 passed"],
            ["ansi bad strong", "1 failed"],
            ["acting", "\\x1b"],
            ["ansi amber", "<b>warned</b>"],
        ]
        assert place.locator("b").count() == 0 and pages.problems + pages.violations() == []
