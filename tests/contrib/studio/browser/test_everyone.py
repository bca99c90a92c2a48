"""axe-core finds nothing on any page, in either theme; a phone needs no sideways scrolling."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from accessibility import found_by_axe
from browser import needs_browser
from seeded_run import seed_run
from studio_pages import pages_of

from openhands_rl_plugin.contrib.studio.sources import sources_at

PAGES = {
    "/?n=2&version=3": ".row:not(.head) a",
    "/?stop=never": ".wrong",
    "/e/fix-orders-breaks?node=5&n=1": ".item .call",
    "/e/kettle-mcts?view=tree&node=30": ".point.here",
    "/e/fix-orders-breaks?view=tokens&node=2&tokens=2.60": ".t.at",
    "/g/fix-cache%2F3": ".twig.forks",
    "/c?a=fix-cache-v3-1&b=fix-cache-v3-2": ".part.differs .one",
    "/q?version=3": ".verdicts",
    "/r": "table",
    "/r/night": ".curve canvas",
    "/a": ".lineage",
    f"/v/{quote('night/evaluation/RLAgent', safe='')}": ".row.instances",
}


@needs_browser
@pytest.mark.slow
def test_nothing_keeps_people_out(seeded) -> None:
    seed_run(seeded, steps=20)
    shown = sources_at([str(seeded / "store"), str(seeded / "night")])
    with pages_of(sources=shown, tokenizer=str(seeded / "tokenizer")) as pages:
        found = []
        for scheme in ("light", "dark"):
            page = pages.anew(color_scheme=scheme, bypass_csp=True, viewport={"width": 1440, "height": 900})
            for address, there in PAGES.items():
                pages.open(address, wait=there)
                page.wait_for_timeout(300)
                found += [f"{scheme} {address} {each}" for each in found_by_axe(page)]
        pages.keys("?")
        page.wait_for_selector("dialog[open]")
        found += found_by_axe(page)
        assert not found, "\n".join(found)
        narrow = pages.anew(viewport={"width": 390, "height": 844})
        for address, there in PAGES.items():
            pages.open(address, wait=there)
            wide = narrow.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= 390, f"{address} is {wide} pixels wide"
