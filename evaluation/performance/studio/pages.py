"""What the studio's pages take in a headless Chromium: first paint, rows, a long episode, tokens, a tree, live ones.

.venv/bin/python -m evaluation.performance.studio.pages --episodes 100000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.performance.studio.episodes import Words, long_episode, searched_episode
from openhands_rl_plugin.contrib.studio.config import StudioConfig
from openhands_rl_plugin.contrib.studio.server import running_studio
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

LONG, TREE = "long", "tree"
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# A key, then the time until what it asks for is laid out.
_AFTER_KEY = """async ([key, selector]) => {
  const began = performance.now();
  document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  while (!document.querySelector(selector)) await new Promise(requestAnimationFrame);
  document.querySelector(selector).getBoundingClientRect();
  return performance.now() - began;
}"""
_SENT = """() => performance.getEntriesByType('resource')
  .find((each) => each.name.endsWith('/episodes/long'))?.encodedBodySize"""
_LAYOUT = """async () => {
  const {laidOut} = await import('studio/base/layout');
  const {modelOf} = await import('studio/base/episode');
  const model = modelOf(await (await fetch('/api/episodes/tree')).json());
  const all = Object.assign(new Set(), {all: true});
  const took = [];
  for (let turn = 0; turn < 5; turn += 1) {
    const began = performance.now();
    const {points} = laidOut(model, all);
    took.push(performance.now() - began);
    if (!points.length) throw new Error('nothing was laid out');
  }
  return took.sort((a, b) => a - b)[2];
}"""


class Figure(NamedTuple):
    """One line of the report."""

    what: str
    bound: str
    measured: str


def fill(folder: Path, episodes: list[Trajectory], *, durable: bool = False) -> None:
    """Store episodes, many at a time. In a thread of its own: Playwright runs an event loop in the caller's."""

    async def add() -> None:
        async with FileTrajectoryStorage(folder, durable=durable) as storage:
            for some in batched(episodes, 256):
                await asyncio.gather(*(storage.add(each) for each in some))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, add()).result()


def filled(folder: Path, total: int) -> Words:
    """A store of ``total`` small episodes, a long one and a searched one, the newest first."""
    words = Words()
    for first in range(0, total, 10_000):
        many = range(first, min(total, first + 10_000))
        fill(folder, [sample_episode(f"small-{at:06}", finished=1e9 + at, task=f"task-{at % 97}") for at in many])
    long = long_episode(words, LONG)
    fill(folder, [searched_episode(words, TREE, seed=3), long])
    return words


def measured(studio: Any, browser: Any, store: Path, repeats: int, total: int) -> list[Figure]:
    """All figures, medians of ``repeats``."""
    page = browser.new_page(base_url=studio.url, viewport={"width": 1440, "height": 900})
    page.goto(studio.link)
    page.wait_for_selector(".row:not(.head) a")
    paint, rows = list[float](), list[float]()
    for _ in range(repeats):
        began = time.perf_counter()
        page.goto("/")
        page.wait_for_selector(".row:not(.head) a")
        rows.append(1000 * (time.perf_counter() - began))
        paint.append(page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    in_page = page.evaluate("() => document.querySelectorAll('.row').length")
    jumps = [_timed(lambda at=at: _jump(page, total, at)) for at in range(repeats)]
    opened, tokens = list[float](), list[float]()
    for _ in range(repeats):
        page.goto("/?n=0")
        page.wait_for_selector(".row.here a")
        opened.append(page.evaluate(_AFTER_KEY, ["Enter", ".item.assistant .call"]))
        page.evaluate(_AFTER_KEY, ["o", ".t"])
        page.wait_for_function("() => document.querySelectorAll('.t').length >= 4096")
        page.keyboard.press("c")
        page.wait_for_selector(".item")
        tokens.append(page.evaluate(_AFTER_KEY, ["o", ".turn:last-of-type .t"]))
    shown = page.evaluate("() => document.querySelectorAll('.t').length")
    skeleton = page.evaluate("async () => (await (await fetch('/api/episodes/long')).text()).length")
    packed = page.evaluate(_SENT)
    layout = page.evaluate(_LAYOUT)
    page.goto("/")
    page.wait_for_selector(".row:not(.head) a")
    page.wait_for_timeout(1500)
    live = [_timed(lambda at=at: _live(page, store, at)) for at in range(repeats)]
    return [
        Figure(f"first paint of the list, {total:,} episodes", "< 1 s", _ms(paint)),
        Figure("rows of it on the screen", "", _ms(rows)),
        Figure("rows in the page", "< 400", str(in_page)),
        Figure("jump to a row far away, until it is there", "< 150 ms and a frame", _ms(jumps)),
        Figure("long episode (35,000 tokens, 300 nodes) on the screen", "< 500 ms", _ms(opened)),
        Figure("its skeleton, sent; unpacked", "< 80 KB", f"{(packed or 0) / 1e3:.0f} KB; {skeleton / 1e3:.0f} KB"),
        Figure(f"{shown:,} coloured tokens drawn", "< 100 ms", _ms(tokens)),
        Figure("tree of 1,000 nodes laid out", "< 50 ms", f"{layout:.1f} ms"),
        Figure("finished episode on the screen", "< 1 s", _ms(live)),
    ]


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ms (longest {max(values):.0f})"


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def _jump(page: Any, total: int, at: int) -> None:
    row = total // 2 - total // 20 * at
    page.evaluate("row => { document.querySelector('.scroll').scrollTop = 36 * row; }", row)
    page.wait_for_selector(f".row[aria-rowindex='{row + 5}'] a")


def _live(page: Any, store: Path, at: int) -> None:
    fill(store, [sample_episode(f"finished-{at}", finished=4e9 + at)], durable=True)
    page.get_by_text(f"finished-{at}", exact=True).wait_for()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        words = filled(Path(folder) / "store", args.episodes)
        words.write_tokenizer(Path(folder) / "tokenizer")
        sources = StudioSources({"store": FileTrajectoryStorage(Path(folder) / "store")})
        config = StudioConfig(port=0, tokenizer=str(Path(folder) / "tokenizer"))
        alone = ["--no-sandbox"] if os.geteuid() == 0 else []
        with running_studio(config, sources) as studio, sync_playwright() as player:
            browser = player.chromium.launch(executable_path=args.browser, args=[*QUIET, *alone])
            try:
                found = measured(studio, browser, Path(folder) / "store", args.repeats, args.episodes)
            finally:
                browser.close()
    for what, bound, measure in found:
        print(f"{what:60} {bound:22} {measure}")


if __name__ == "__main__":
    main()
