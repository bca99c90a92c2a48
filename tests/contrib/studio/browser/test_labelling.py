"""What people say of episodes in the browser is a label in the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from studio_pages import Pages

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def stored(folder: Path, episode: str) -> Sequence[Label]:
    async def read() -> Sequence[Label]:
        async with FileTrajectoryStorage(folder / "store") as storage:
            return await storage.labels([episode])

    # Playwright runs a loop in this thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, read()).result()


def test_keys_of_the_queue_make_labels(pages: Pages, seeded: Path) -> None:
    page = pages.open("/q?contains=fix-cache-v1-", wait=".verdicts")
    page.wait_for_selector(".item.assistant")
    assert not page.query_selector(".reward"), "who judges does not see what a grader said"
    pages.keys("m")
    page.keyboard.type("cut too early")
    pages.keys("Enter")
    page.wait_for_function("() => document.querySelector('#remark').value === ''")
    pages.keys("y")
    page.wait_for_function("() => location.search.includes('n=1')")
    page.wait_for_selector(".item.assistant")
    pages.keys("n")
    page.wait_for_function("() => location.search.includes('n=2')")
    said = {each.trajectory_id: each for at in range(4) for each in stored(seeded, f"fix-cache-v1-{at}")}
    assert [each.value for each in said.values() if each.kind == "verdict"] == [0.0, 1.0]
    assert "cut too early" in [each.text for at in range(4) for each in stored(seeded, f"fix-cache-v1-{at}")]


def test_a_pair_becomes_a_preference(pages: Pages, seeded: Path) -> None:
    page = pages.open("/q?contains=fix-parser-v2-2&pairs=1", wait=".two")
    # Nobody judges what is not there yet: the keys and the buttons wait for both sides.
    page.wait_for_selector(".verdicts button:not([disabled]) >> text=Left is better")
    assert page.locator(".two section:has(.item.assistant)").count() == 2
    left = page.locator(".two section").first.locator(".text.said").all_inner_texts()
    pages.keys("1")
    page.wait_for_selector(".empty")
    (label,) = stored(seeded, "fix-parser-v2-2")
    page = pages.open("/e/fix-parser-v2-2", wait=".item.assistant")
    mine = page.locator(".text.said").all_inner_texts() == left
    assert label.kind == "preference" and (label.other or "").startswith("fix-parser-v2-")
    assert label.value == (1.0 if mine else 0.0)


def test_a_comment_on_tokens_is_stored_shown_and_exported(pages: Pages, seeded: Path, tmp_path: Path) -> None:
    page = pages.open("/e/fix-config-v1-1?view=tokens&node=2", wait=".t:not(.prompt)")
    first = page.locator('[data-t^="2."]:not(.prompt)').first.get_attribute("data-t") or ""
    start = int(first.split(".")[1])
    page.locator(f'[data-t="2.{start + 3}"]').click()
    page.locator(f'[data-t="2.{start + 7}"]').click(modifiers=["Shift"])
    page.wait_for_function(f"() => location.search.includes('tokens=2.{start + 3}-{start + 7}')")
    pages.keys(">", "<", "<", "m")
    assert page.locator("#remark").get_attribute("placeholder") == "Comment on 4 tokens"
    page.keyboard.type("here it goes wrong")
    pages.keys("Enter")
    page.wait_for_selector(".t.noted")
    (label,) = stored(seeded, "fix-config-v1-1")
    assert (label.kind, label.node, label.tokens, label.text) == ("comment", 2, (3, 7), "here it goes wrong")
    assert page.locator(".t.noted").count() == 4
    page.locator(f'[data-t="2.{start}"]').click()
    page.get_by_role("button", name="4 tokens of node 2").click()
    page.wait_for_function(f"() => location.search.includes('tokens=2.{start + 3}-{start + 6}')")
    # The tokens are pointed at after the address has changed.
    page.locator(".hover .remark", has_text="here it goes wrong").wait_for()
    # A selection that is drawn with the mouse, and one of the prompt, about which nothing can be said.
    boxes = [page.locator(f'[data-t="2.{start + at}"]').bounding_box() for at in (8, 9)]
    assert boxes[0] is not None and boxes[1] is not None
    page.mouse.move(boxes[0]["x"] + 1, boxes[0]["y"] + 4)
    page.mouse.down()
    page.mouse.move(boxes[1]["x"] + boxes[1]["width"] - 1, boxes[1]["y"] + 4, steps=4)
    page.mouse.up()
    page.wait_for_function(f"() => location.search.includes('tokens=2.{start + 8}-{start + 9}')")
    page.locator('[data-t="2.0"]').click()
    page.wait_for_function("() => document.querySelector('#remark').placeholder === 'Comment, or #tag'")
    out = tmp_path / "all.jsonl"
    exported = ["export", str(seeded / "store"), "--format", "trajectories", "--contains", "fix-config-v1-1"]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(cli.main, [*exported, "--out", str(out)]).result() == 0
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert [(each["text"], each["node"], each["tokens"]) for each in row["labels"]] == [(label.text, 2, [3, 7])]
