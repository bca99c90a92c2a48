"""What people labelled and what verifiers think have columns of their own, and are rewards for who names them only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.rollout.verdicts import give_verdict
from openhands_rl_plugin.testing.samples import sample_episode
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
            await give_verdict(storage, "e0", 0.0, author="ann")
            for author, value in (("ann", 1.0), ("bob", 0.0), ("cay", 1.0)):
                await give_verdict(storage, "e1", value, author=author)

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
    assert cli.main(["list", str(store), "--query", "id:nobody"]) == 0
    assert "human" not in capsys.readouterr().out, "no column where nobody said anything"


def test_they_are_the_reward_for_who_names_them(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    human = ["--reward", "human"]
    assert listed(store, capsys, *human) == [("e0", 0.0), ("e1", 1.0), ("e2", None)]
    assert listed(store, capsys, *human, "--sort", "reward", "--desc") == [("e1", 1.0), ("e0", 0.0), ("e2", None)]
    assert listed(store, capsys, *human, "--sort", "reward") == [("e0", 0.0), ("e1", 1.0), ("e2", None)]
    assert listed(store, capsys, *human, "--min-reward", "0.5") == [("e1", 1.0)]
    assert listed(store, capsys, *human, "--query", "reward:<0.5 sort:-tokens") == [("e0", 0.0)]
    assert listed(store, capsys, *human, "--limit", "1", "--offset", "1") == [("e1", 1.0)]
    assert listed(store, capsys, "--reward", "tests") == listed(store, capsys)
    assert listed(store, capsys, "--reward", "verifier", "--max-reward", "0.3") == [("e0", 0.0), ("e1", 0.25)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("label:good", ["e1"]),
        ("label:bad", ["e0", "e1"]),
        ("human:>=1", ["e1"]),
        ("human:*", ["e0", "e1"]),
        ("id:e* -human:*", ["e2"]),
        ("verifier:0.25..1", ["e1", "e2"]),
        ("reward:1 human:0", ["e0"]),
        ("human:1|0", ["e0", "e1"]),
    ],
)
def test_a_query_finds_them(store: Path, query: str, found: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [identity for identity, _ in listed(store, capsys, "--query", query)] == found


def test_statistics_go_by_outcomes_unless_another_reward_is_named(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["stats", str(store), "--by", "run", "--json"]
    assert cli.main(words) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["valid"], figures["reward"]["mean"], figures["success"]["mean"]) == (3, pytest.approx(2 / 3), 2 / 3)
    assert {name: each["mean"] for name, each in figures["opinions"].items()} == {"human": 0.5, "verifier": 0.25}
    assert cli.main([*words, "--reward", "human"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["valid"], figures["reward"]["mean"]) == (2, 0.5)
    assert cli.main(["stats", str(store), "--by", "run"]) == 0
    said = capsys.readouterr().out
    assert "human" in said.splitlines()[0]


def test_a_wrong_bound_of_an_opinion_is_said_in_a_line(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(store), "--query", "human:good"]) == 1
    assert "human: 'good' is no number; write human:5, human:>20 or human:7..9" in capsys.readouterr().err
