"""From clicks in the browser to a trained preference pair, by three commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import needs_browser
from studio_pages import Pages, pages_of
from train_store import TINY, episode, store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.types import Message, Task, Trajectory

TASK = Task(id="mend", environment="workspace", instruction="Mend the parser.")


def attempt(at: int) -> Trajectory:
    """An attempt that nobody judged, with words of its own."""
    made = episode(at, 0.0, id=f"attempt-{at}", task=TASK)
    said = Message(role="assistant", content=f"way {at}")
    nodes = [each.model_copy(update={"message": said}) if each.sampled else each for each in made.nodes]
    return made.model_copy(update={"nodes": tuple(nodes)})


def click_verdict(pages: Pages, at: int, words: str) -> None:
    page = pages.open(f"/q?contains=attempt-{at}", wait=".item.assistant")
    page.get_by_role("button", name=words).click()
    page.wait_for_selector(".empty")


@needs_browser
@pytest.mark.slow
def test_clicks_become_a_trained_pair(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_of(tmp_path / "store", *map(attempt, range(2)))
    with pages_of(store, author="ann") as pages:
        click_verdict(pages, 0, "Good")
        click_verdict(pages, 1, "Bad")
        page = pages.open("/q?contains=attempt-1&pairs=1", wait=".two")
        page.wait_for_selector(".verdicts button:not([disabled]) >> text=Left is better")
        left = page.locator(".two section").first.inner_text()
        page.get_by_role("button", name="Left is better" if "way 1" in left else "Right is better").click()
        page.wait_for_selector(".empty")
        assert pages.problems == []
    assert cli.main(["list", str(store), "--json"]) == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert {row["reward"] for row in rows} == {None}, "no click is a reward"

    pairs = tmp_path / "pairs.jsonl"
    assert cli.main(["export", str(store), "--format", "preferences", "--out", str(pairs)]) == 0
    (row,) = map(json.loads, pairs.read_text(encoding="utf-8").splitlines())
    assert (row["trajectory_id"], row["rejected_id"]) == ("attempt-1", "attempt-0")
    capsys.readouterr()
    assert cli.main(["score", str(store), "--reward", "human"]) == 0
    assert "human-1: 2 scored, 0 already" in capsys.readouterr().out
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *TINY]
    assert cli.main([*words, "--algorithm", "dpo", "--reward", "human"]) == 0
    said = capsys.readouterr().out
    # By the rewards the other one is better: of two that a person compared, that word counts.
    assert "pairs: 1, of them said by people 1" in said and "policy-v000001: steps" in said
