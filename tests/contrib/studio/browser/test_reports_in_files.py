"""Reports opened from the disk, full of what models could write: shown as text, nothing runs, nothing is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Seen, needs_browser, opened
from demo_episodes import played
from hostile import ACTED_UPON, CONTROLS, MARKUP, TEXT
from report_data import data_of

from openhands_rl_plugin.contrib.studio.reports import write_run_report
from openhands_rl_plugin.core.statistics import Estimate
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.training.loop.plan import LoopState, RunFacts, SamplePair, StageChange, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

FOREIGN = "img, iframe, object, embed, base, form, [onerror], [onload], [onmouseover], [onfocus], a[href^='javascript']"


def run_report(folder: Path) -> Path:
    """Of a run whose every text is hostile."""
    figures = {"success": 0.5, "successes": 1.0, "reward": 0.5, "turns": 1.0, "episodes": 2.0, "failed": 0.0}
    stages = ("evaluate-base", f"evaluate-{TEXT}", "evaluate-final")
    records = [StageRecord(name=name, adapter=TEXT, metrics=figures, started=0.0, finished=1.0) for name in stages]
    LoopState(records=tuple(records)).save(folder / "state.json")
    change = StageChange(name=TEXT, before=TEXT, after=TEXT, difference=Estimate(mean=0.5, low=0.1, high=0.9, n=2))
    metrics = folder / "training" / "warm-start" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')

    async def write() -> Path:
        async with FileTrajectoryStorage(folder / "store") as storage:
            samples: list[SamplePair] = []
            for at, each in enumerate((*MARKUP, *CONTROLS)):
                text, ids = f"{TEXT} {each}", list[str]()
                for stage, earned in (("base", 0.0), ("final", 1.0)):
                    episode = played(stage, text, earned, asked=text, said=text, policy=PolicyRef(base_model=text))
                    episode = episode.model_copy(update={"id": f"{stage}-{at}-{each}"})
                    await storage.add(episode)
                    ids.append(episode.id)
                samples.append(SamplePair(task=text, before=ids[0], after=ids[1]))
            said = {"title": TEXT, "base_model": TEXT, "command": TEXT, "machine": TEXT, "versions": {TEXT: TEXT}}
            RunFacts(run_id=TEXT, **said, changes=(change,), samples=tuple(samples[:4])).save(folder)
            return await write_run_report(folder, storage, folder / "adapters")

    return asyncio.run(write())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_report(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Seen]:
    """After the report is written: Playwright runs a loop in this thread."""
    with opened() as seen:
        yield seen


def look(seen: Seen, file: Path, address: str, there: str) -> str:
    """The text of a page of the file, and what stands in its attributes."""
    seen.page.goto(f"{file.as_uri()}{address}")
    seen.page.wait_for_selector(there, state="attached")
    seen.page.wait_for_timeout(300)
    for summary in seen.page.query_selector_all("main details:not([open]) > summary, main .more"):
        summary.evaluate("each => each.click()")
    said = "[...document.querySelectorAll('[title], [aria-label]')].map((each) => each.title + each.ariaLabel).join('')"
    return seen.page.evaluate(f"() => document.getElementById('app').textContent + {said}")


def is_harmless(seen: Seen, text: str) -> None:
    page: Any = seen.page
    assert not set(text) & ACTED_UPON
    assert page.evaluate("() => window.owned") is None
    assert page.query_selector_all(FOREIGN) == []
    assert [url for url in seen.asked if not url.startswith(("file:", "data:"))] == []
    assert seen.said == []


@needs_browser
@pytest.mark.slow
def test_nothing_in_the_report_of_a_run_does_anything(report: Path, page: Seen) -> None:
    file = report
    pair = data_of(file)["runs/" + file.parent.name]["facts"]["samples"][0]
    assert pair["after"].startswith("final-0")
    for address, there in {
        "": ".sample .message",
        "#/a": ".heading",
        "#/": ".row:not(.head)",
        "#/nowhere": ".empty",
    }.items():
        text = look(page, file, address, there)
        is_harmless(page, text)
        if not address:
            assert "<script>window.owned=1</script>" in text and "\\u202egnp.exe" in text
    page.page.goto(file.as_uri())
    page.page.click(".sample header a")
    page.page.wait_for_selector(".part.differs, .fold")
    page.page.click(".pair.head a")
    page.page.wait_for_selector(".item")
    is_harmless(page, page.page.evaluate("() => document.getElementById('app').textContent"))
