"""The demo's report, read as a browser would: curves, lineage, examples, and nothing that lies elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from demo_episodes import played

from openhands_rl_plugin.apps.demo.report import comparisons, write_report
from openhands_rl_plugin.core.types import PolicyRef, Trajectory
from openhands_rl_plugin.models.adapters.peft_format import WEIGHTS_FILE
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

BEFORE = {"goal-a": 0.0, "goal-b": 0.5, "goal-c": 0.0, "goal-d": 0.25, "goal-e": 1.0}
AFTER = {"goal-a": 1.0, "goal-b": 0.75, "goal-c": 0.5, "goal-d": 0.25, "goal-e": 0.0}
ADAPTERS = ("shop-v000001", "shop-v000002", "shop-v000003")


def attempt(stage: str, goal: str, earned: float) -> Trajectory:
    policy = PolicyRef.from_served_name("base", ADAPTERS[-1] if stage == "final" else "base")
    asked, said = f"Buy <b>{goal}</b>.", f"click[{stage} & {goal}]"
    return played(stage, goal, earned, asked=asked, said=said, policy=policy)


def record(name: str, adapter: str | None, success: float, reward: float) -> StageRecord:
    figures = {"success": success, "successes": 5 * success, "reward": reward, "turns": 1.0, "episodes": 5, "failed": 0}
    return StageRecord(name=name, adapter=adapter, metrics=figures, started=0.0, finished=1.0)


STATE = LoopState(
    records=(
        record("evaluate-base", None, 0.2, 0.35),
        record("demonstrate", None, 1.0, 1.0),
        StageRecord(name="warm-start", adapter=ADAPTERS[0], metrics={"loss": 1.0}, started=0.0, finished=1.0),
        record("evaluate-warm-start", ADAPTERS[0], 0.4, 0.45),
        record("iteration-000", ADAPTERS[1], 0.3, 0.4),
        record("iteration-001", ADAPTERS[2], 0.6, 0.5),
        record("evaluate-final", ADAPTERS[2], 0.8, 0.9),
    )
)


def written(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"weights")


@pytest.fixture
async def page(tmp_path: Path) -> str:
    adapters = AdapterStore(tmp_path / "adapters")
    for parent in (None, *ADAPTERS[:2]):
        adapters.create("shop", written, base_model="base", parent=parent, step=3)
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        for stage, returns in (("base", BEFORE), ("warm-start", BEFORE), ("final", AFTER)):
            for goal, earned in returns.items():
                await storage.add(attempt(stage, goal, earned))
        return (await write_report(tmp_path / "report.html", STATE, storage, adapters, "run")).read_text()


def curves(page: str) -> ElementTree.Element:
    (drawn,) = re.findall(r"<svg.*?</svg>", page)
    return ElementTree.fromstring(drawn)


def heights(chart: ElementTree.Element, series: str) -> list[tuple[float, float]]:
    """Value and height on the page of each point of a curve, from the left to the right."""
    circles = [circle for circle in chart.findall(".//{*}circle") if (circle[0].text or "").startswith(series)]
    circles.sort(key=lambda circle: float(circle.get("cx", "")))
    return [
        (float((circle[0].text or "").rpartition(" ")[2]), -float(circle.get("cy", "")))  # y goes down
        for circle in circles
    ]


async def test_success_and_reward_are_drawn_stage_by_stage(page: str) -> None:
    chart = curves(page)
    assert [value for value, _ in heights(chart, "held-out success")] == [0.2, 0.4, 0.8]
    assert [value for value, _ in heights(chart, "held-out mean reward")] == [0.35, 0.45, 0.9]
    assert [value for value, _ in heights(chart, "rollout mean reward")] == [0.4, 0.5]
    for series in ("held-out success", "held-out mean reward", "rollout mean reward"):
        points = heights(chart, series)
        assert sorted(points) == sorted(points, key=lambda point: point[1]), "higher is better"
    assert sorted(len((line.get("points") or "").split()) for line in chart.findall("{*}polyline")) == [2, 3, 3]
    shown = [text.text for text in chart.findall("{*}text")]
    assert [label for label in shown if label in {"base", "SFT", "0", "1", "RL"}] == ["base", "SFT", "0", "1", "RL"]


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its own first row."""
    table = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")]
    return [[re.sub(r"<.*?>", "", cell) for cell in row] for row in cells if row]


async def test_every_adapter_names_the_one_that_it_came_from(page: str) -> None:
    assert [row[:3] for row in rows(page, "Adapters")] == [
        ["shop-v000001", "base model", "3"],
        ["shop-v000002", "shop-v000001", "3"],
        ["shop-v000003", "shop-v000002", "3"],
    ]
    assert [row[0] for row in rows(page, "Held-out success and reward")] == [
        "base",
        "warm-start",
        "final",
    ]


async def test_the_examples_are_the_goals_whose_return_rose_most_and_say_so(page: str) -> None:
    examples = page.partition("<h2>Before and after: the goals with the largest gain in return</h2>")[2]
    assert re.findall(r"<h3>(.*?)</h3>", examples) == ["goal-a", "goal-c", "goal-b"]
    for goal, pair in zip(("goal-a", "goal-c", "goal-b"), examples.split("<h3>")[1:], strict=True):
        before, after = pair.split("<div class='turns'>")[1:]
        assert before.startswith("<b>base model</b>") and f"return {BEFORE[goal]:.2f}" in before
        assert after.startswith("<b>shop-v000003</b>") and f"return {AFTER[goal]:.2f}" in after
        assert f"click[base &amp; {goal}]" in before and f"click[final &amp; {goal}]" in after
        assert f"Buy &lt;b&gt;{goal}&lt;/b&gt;." in before, "what was said is shown, not obeyed"


FETCHING = {"script", "link", "iframe", "object", "embed", "base"}
REFERRING = {"src", "href", "xlink:href", "data", "srcset", "action"}


class Needs(HTMLParser):
    """What a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs if name != "xmlns"}
        elsewhere = any("//" in value or "url(" in value for value in told.values())
        if tag in FETCHING or told.keys() & REFERRING or elsewhere:
            self.found.append(tag)


async def test_the_page_needs_nothing_else(page: str) -> None:
    needs = Needs()
    needs.feed(page)
    assert needs.found == []
    assert "url(" not in page and "@import" not in page


async def test_what_was_played_once_only_is_compared_with_nothing(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        for stage, returns in (("warm-start", BEFORE), ("final", AFTER)):
            for goal, earned in returns.items():
                await storage.add(attempt(stage, goal, earned))
        (sentence,) = await comparisons(storage, "run")
    assert sentence.startswith("After RL against SFT: +0.00 in success") and "5 goals" in sentence
