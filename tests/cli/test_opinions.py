"""What people labelled and what verifiers think have columns of their own, and are rewards for who names them only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import LabelKind
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.rollout.scoring import add_label
from openhands_rl_plugin.testing.storage import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A grader says 1, 0 and 1 of three episodes; people 0, 1 and nothing; a verifier 0, 0.25 and 0.5."""

    async def fill() -> None:
        async with FileTrajectoryStorage(tmp_path) as storage:
            for at, graded in enumerate((1.0, 0.0, 1.0)):
                await storage.add(sample_episode(f"e{at}", environment="workspace"))
                thought = Score(trajectory_id=f"e{at}", reward=0.25 * at, reward_version="verifier-1@x")
                outcome = Score(trajectory_id=f"e{at}", reward=graded, reward_version="tests-1")
                await storage.add_scores([outcome, thought])
            await add_label(storage, "e0", LabelKind.VERDICT, value=0.0, author="ann")
            for author, value in (("ann", 1.0), ("bob", 0.0), ("cay", 1.0)):
                await add_label(storage, "e1", LabelKind.VERDICT, value=value, author=author)

    asyncio.run(fill())
    assert cli.main(["score", str(tmp_path), "--reward", "human"]) == 0
    return tmp_path


def listed(store: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[str, float | None]]:
    capsys.readouterr()
    assert cli.main(["list", str(store), "--json", *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(row["id"], row["reward"]) for row in rows]


def test_columns_of_their_own(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(store, capsys) == [("e0", 1.0), ("e1", 0.0), ("e2", 1.0)]
    assert cli.main(["list", str(store)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[head.index("reward") :][:3] == ["reward", "human", "verifier"]
    at = head.index("reward")
    assert [row[at : at + 3] for row in rows[:3]] == [["1", "0", "0"], ["0", "1", "0.25"], ["1", "-", "0.5"]]
    assert cli.main(["list", str(store), "--contains", "nobody"]) == 0
    assert "human" not in capsys.readouterr().out, "no column where nobody said anything"


def test_they_are_the_reward_for_who_names_them(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    human = ["--reward", "human"]
    assert listed(store, capsys, *human) == [("e0", 0.0), ("e1", 1.0), ("e2", None)]
    assert listed(store, capsys, *human, "--sort", "reward", "--desc") == [("e1", 1.0), ("e0", 0.0), ("e2", None)]
    assert listed(store, capsys, *human, "--min-reward", "0.5") == [("e1", 1.0)]
    assert listed(store, capsys, "--reward", "tests") == listed(store, capsys)
    assert listed(store, capsys, "--reward", "verifier", "--max-reward", "0.3") == [("e0", 0.0), ("e1", 0.25)]


def test_statistics_go_by_outcomes_unless_another_reward_is_named(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["list", str(store), "--by", "run", "--json"]
    assert cli.main(words) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["valid"], figures["reward"]["mean"], figures["success"]["mean"]) == (3, pytest.approx(2 / 3), 2 / 3)
    assert {name: each["mean"] for name, each in figures["opinions"].items()} == {"human": 0.5, "verifier": 0.25}
    assert cli.main([*words, "--reward", "human"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["valid"], figures["reward"]["mean"]) == (2, 0.5)
