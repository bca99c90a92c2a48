"""Whatever a model or an environment writes is text on every page: nothing of it runs, loads, turns or hides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import needs_browser
from hostile import ACTED_UPON, CONTROLS, MARKUP, TEXT
from seeded_store import hostile
from studio_pages import Pages, pages_of

from openhands_rl_plugin.contrib.studio.sources import sources_at
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

ID = "<img src=x onerror=window.owned=1>"
OTHER = "\u202e<script>window.owned=1</script>"


def fill(folder: Path) -> None:
    async def store() -> None:
        async with FileTrajectoryStorage(folder / "trajectories") as storage:
            for identity in (ID, OTHER):
                episode = hostile(identity, (*MARKUP, *CONTROLS))
                await storage.add(episode)
                score = Score(trajectory_id=identity, reward=0.5, reward_version=TEXT, detail={TEXT: TEXT})
                await storage.add_scores([score])
                comment = {"trajectory_id": identity, "text": TEXT, "at": 1.0}
                remark = Label(id=identity, kind=LabelKind.COMMENT, author=TEXT, **comment)
                verdicts = [
                    Label(id=f"{identity}{value}", kind=LabelKind.VERDICT, author=author, value=value, **comment)
                    for author, value in ((TEXT, 1.0), (OTHER, 0.0))
                ]
                await storage.add_labels([remark, *verdicts])

    asyncio.run(store())
    outcome = {"instance_id": TEXT, "kind": "failed", "reason": TEXT, "turns": 3, "trajectory_id": ID}
    row = {
        "instance_id": TEXT,
        "test_result": {"git_patch": f"--- a\n+{TEXT}", "outcome": outcome, "report": {TEXT: TEXT}},
    }
    (folder / "evaluation" / "RLAgent").mkdir(parents=True)
    (folder / "evaluation" / "RLAgent" / "output.jsonl").write_text(f"{json.dumps(row | {'error': TEXT})}\n")
    (folder / "adapters" / "shop-v000001").mkdir(parents=True)
    (folder / "adapters" / "shop-v000001" / "manifest.json").write_text(json.dumps({"name": TEXT}))
    (folder / "state.json").write_text('{"records": []}')
    (folder / "run_id").write_text(TEXT)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, TEXT: 0.5})}\n")


def addresses() -> dict[str, str]:
    one, other, group = quote(ID, safe=""), quote(OTHER, safe=""), quote(f"{TEXT}", safe="")
    views = {f"/e/{one}?view={view}&node=4": "#view *" for view in ("conversation", "tree", "tokens")}
    return {
        "/": ".row:not(.head) a",
        **views,
        f"/e/{quote(TEXT, safe='')}?view={group}": ".problem",
        f"/g/{group}": ".twig, .empty, .problem",
        f"/c?a={one}&b={other}": ".fold, .part",
        f"/?contains={group}&run={group}": ".wrong, .row, .empty",
        "/q?n=0": ".item",
        "/r": "h1",
        f"/r/{quote('hostile', safe='')}": ".heading, .curve",
        "/a": ".lineage",
        f"/v/{quote('hostile/evaluation/RLAgent', safe='')}?instance={group}": ".row.instances",
    }


FOREIGN = (
    "img, iframe, object, embed, base, meta[http-equiv], [onerror], [onload], [onmouseover], [onfocus], "
    "a[href^='javascript']"
)


def looked_at(pages: Pages, address: str, there: str) -> str:
    page = pages.open(address, wait=there)
    page.wait_for_timeout(250)
    for element in page.query_selector_all("main details:not([open]) > summary, main .more, main .call .name button"):
        element.evaluate("each => each.click()")
    assert page.evaluate("() => window.owned") is None, address
    assert page.query_selector_all(FOREIGN) == [], address
    assert page.evaluate("() => document.scripts.length") == 2, address
    assert pages.violations() == [], address
    text = "[...document.querySelectorAll('[title], [aria-label]')].map((each) => each.title + each.ariaLabel).join('')"
    return page.evaluate(f"() => document.documentElement.textContent + {text}")


@needs_browser
@pytest.mark.slow
def test_no_text_does_anything(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    fill(folder)
    with pages_of(sources=sources_at([str(folder)])) as pages:
        shown = ""
        for address, there in addresses().items():
            text = looked_at(pages, address, there)
            assert not set(text) & ACTED_UPON, address
            shown += text
        assert "<script>window.owned=1</script>" in shown and "\\u202egnp.exe" in shown
        pages.problems = [each for each in pages.problems if "the server responded with" not in each]
        assert pages.problems == []
