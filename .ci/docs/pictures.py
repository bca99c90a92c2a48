"""The pictures of the studio: ``.venv/bin/python .ci/docs/pictures.py --run runs/demo``, with Playwright and Chromium.

The main pages at three widths in both themes go to ``docs/images``; ``--out DIR`` writes every page there instead, to
be looked at. ``--run``: the folder of a finished demo, for its page and its report.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / "helpers" / each) for each in ("", "attacks", "servers", "studio"))]

from PIL import Image  # noqa: E402
from seeded_run import seed_run  # noqa: E402
from seeded_store import seed  # noqa: E402
from studio_pages import Pages, pages_of  # noqa: E402

from openhands_rl_plugin.contrib.studio.sources import sources_at  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
WIDTHS = {"": (1440, 900), "tablet": (1024, 768), "phone": (390, 844)}
REPORT = "report"


_WIDTH = """() => Math.max(
  ...[document.documentElement, ...document.querySelectorAll('.page')].map((each) => each.scrollWidth))"""


class Picture(NamedTuple):
    """A page, what is there when it is drawn, the heading that it is scrolled to, and pixels below the window."""

    address: str
    there: str
    heading: str = ""
    taller: int = 0


VIEWS = {
    "episodes": Picture("/?n=2", ".row:not(.head) a"),
    "conversation": Picture("/e/fix-orders-breaks?node=5&n=1", ".item .call"),
    "tree": Picture("/e/kettle-mcts?view=tree&node=30", ".point.here"),
    "tokens": Picture("/e/fix-orders-breaks?view=tokens&node=2&tokens=2.60", ".t.at"),
    "group": Picture("/g/fix-cache%2F3", ".twig.forks"),
    "compare": Picture("/c?a=fix-cache-v3-1&b=fix-cache-v3-2", ".part.differs .one"),
    "run": Picture("", ".curve canvas", taller=300),
    "adapters": Picture("/a", ".lineage"),
    "evaluation": Picture(f"/v/{quote('night/evaluation/RLAgent', safe='')}", ".row.instances"),
    "evaluations": Picture("/v", ".share"),
    "queue": Picture("/q?query=version:3", ".verdicts"),
    REPORT: Picture("", ".sample .message", "Before and after"),
}
SHOWN = ("episodes", "tokens", "tree", "run", REPORT)
"""The views whose pictures are in the documentation."""


@contextmanager
def studio(run: Path) -> Iterator[Pages]:
    """The pages of a seeded store, a seeded loop with an evaluation, and of ``run``."""
    with tempfile.TemporaryDirectory() as folder:
        seeded = Path(folder)
        seed(seeded)
        seed_run(seeded)
        shown = sources_at([str(seeded / "store"), str(seeded / "night"), str(run)])
        with pages_of(sources=shown, tokenizer=str(seeded / "tokenizer")) as pages:
            yield pages


def drawn(pages: Pages, run: Path, view: str, size: str, theme: str) -> bytes:
    """A page as PNG. A long one is cut at the window's height."""
    width, height = WIDTHS[size]
    height += VIEWS[view].taller
    page: Any = pages.anew(color_scheme=theme, viewport={"width": width, "height": height})
    address, there, heading, _ = VIEWS[view]
    if view == REPORT:
        page.goto((run / "report.html").resolve().as_uri())
        page.wait_for_selector(there, state="attached")
    else:
        pages.open(address or f"/r/{quote(run.name, safe='')}", wait=there)
    page.wait_for_timeout(700)
    if heading:
        page.get_by_role("heading", name=heading).evaluate("each => each.scrollIntoView({block: 'start'})")
        page.wait_for_timeout(200)
    wide = page.evaluate(_WIDTH)
    if wide > width:
        print(f"{view} {width} {theme}: is {wide} pixels wide")
    return page.screenshot()


def written(file: Path, png: bytes) -> None:
    """As a palette, which is a third of the bytes and looks the same."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    if file.stat().st_size > MOST_BYTES:
        print(f"{file} has {file.stat().st_size:,} bytes, which is too much")


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished demo")
    parser.add_argument("--out", type=Path, help="draw all pages there, to be looked at")
    parser.add_argument("--only", nargs="+", choices=list(VIEWS), default=list(VIEWS))
    args = parser.parse_args()
    views = [view for view in args.only if args.out or view in SHOWN]
    every = [(view, size, theme) for view in views for size in WIDTHS for theme in ("light", "dark")]
    out = args.out or IMAGES
    out.mkdir(parents=True, exist_ok=True)
    with studio(args.run) as pages:
        for view, size, theme in every:
            name = "-".join(filter(None, ("studio", view, size, "dark" if theme == "dark" else "")))
            written(out / f"{name}.png", drawn(pages, args.run, view, size, theme))
        for problem in pages.problems:
            if not problem.startswith("asked for file:"):
                print(problem)


if __name__ == "__main__":
    main()
