"""``score --value`` is the outcome, a label is not: ``score --reward human`` makes scores of what people labelled.
All of it may be withdrawn. So may a preference between two attempts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from train_store import episode, store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.judgements import opinions
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Failure, FailureKind, Message, Score, Task, Trajectory
from openhands_rl_plugin.rollout.scoring import add_label
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SESSION = Task(id="session", environment="workspace", instruction="Mend the parser.")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three ordinary runs that nobody judged, one that a grader did, and one that failed."""
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    runs = [episode(at, 0.0, id=f"run-{at}", task=SESSION, evidence={"git_patch": f"+line {at}"}) for at in range(4)]
    for at, run in enumerate(runs):
        last = run.nodes[-1].model_copy(update={"message": Message(role="assistant", content=f"! {at}")})
        runs[at] = run.model_copy(update={"nodes": (*run.nodes[:-1], last)})
    folder = store_of(tmp_path / "store", *runs, episode(4, 0.0, id="failed", failure=failure))

    async def grade() -> None:
        async with FileTrajectoryStorage(folder) as storage:
            await storage.add_scores([Score(trajectory_id="run-3", reward=1.0, reward_version="tests-1")])

    asyncio.run(grade())
    return folder


def read(store: Path) -> tuple[dict[str, tuple[Score, ...]], tuple[Label, ...]]:
    async def find() -> tuple[dict[str, tuple[Score, ...]], tuple[Label, ...]]:
        async with FileTrajectoryStorage(store) as storage:
            found: list[tuple[Trajectory, tuple[Score, ...]]] = [each async for each in storage.find()]
            labels = await storage.labels([trajectory.id for trajectory, _ in found])
            return {trajectory.id: scores for trajectory, scores in found}, labels

    return asyncio.run(find())


def rewards(store: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float | None]:
    capsys.readouterr()
    assert cli.main(["list", str(store), "--json", *words]) == 0
    return {row["id"]: row["reward"] for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_what_nobody_judged_is_a_dash_and_no_part_of_a_rate(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rewards(store, capsys) == {"run-0": None, "run-1": None, "run-2": None, "run-3": 1.0, "failed": None}
    assert cli.main(["list", str(store), "--by", "run", "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["episodes"], figures["valid"], figures["success"]["mean"]) == (5, 1, 1.0)
    assert cli.main(["show", str(store), "run-0"]) == 0
    assert "return -" in capsys.readouterr().out


def test_a_score_by_hand_is_the_outcome_until_it_is_withdrawn(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", str(store), "--id", "run-0", "--id", "run-3"]
    assert cli.main([*words, "--value", "0.5", "--note", "half of it"]) == 0
    assert capsys.readouterr().out == "run-0: 0.5\nrun-3: 0.5\n"
    assert rewards(store, capsys, "--labelled", "verdict") == {"run-0": 0.5, "run-3": 0.5}
    scores, labels = read(store)
    assert scores["run-0"][0].detail["note"] == "half of it"
    assert [(label.kind, label.value, label.text) for label in labels] == [(LabelKind.VERDICT, 0.5, "half of it")] * 2
    assert cli.main([*words, "--value", "none"]) == 0
    assert (rewards(store, capsys)["run-0"], rewards(store, capsys)["run-3"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--value", "1"], "give its --id"),
        (["--value", "1", "--id", "run"], "4 episodes have an id that begins with 'run'"),
        (["--value", "1", "--id", "run-0", "--id", "nobody"], "no episode has an id that begins with 'nobody'"),
        (["--value", "1", "--id", "failed"], "failed failed (infrastructure)"),
        (["--reward", "return", "--id", "run-0"], "give --value REWARD too"),
    ],
)
def test_a_wrong_score_leaves_nothing(
    store: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["score", str(store), *words]) == 1
    assert said in capsys.readouterr().err
    assert rewards(store, capsys)["run-0"] is None


def human(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float | None]:
    """What ``score --reward human`` makes of the labels."""
    assert cli.main(["score", str(store), "--reward", "human"]) == 0
    capsys.readouterr()
    scores, _ = read(store)
    return {name: opinions(each).get("human") for name, each in scores.items()}


def test_the_newest_label_is_taken_back_and_the_one_before_holds_again(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def label() -> None:
        async with FileTrajectoryStorage(store) as storage:
            await add_label(storage, "run-0", LabelKind.VERDICT, value=1.0, author="ann")

    asyncio.run(label())
    own = ["score", str(store), "--author", "ann"]
    assert (rewards(store, capsys)["run-0"], human(store, capsys)["run-0"]) == (None, 1.0), "a label is no reward"
    assert cli.main([*own, "--id", "run-0", "--value", "0.25"]) == 0
    assert (rewards(store, capsys)["run-0"], human(store, capsys)["run-0"]) == (0.25, 0.25)
    assert cli.main([*own, "--undo"]) == 0
    assert "taken back: verdict of run-0" in capsys.readouterr().out
    assert (rewards(store, capsys)["run-0"], human(store, capsys)["run-0"]) == (None, 1.0)
    assert cli.main([*own, "--undo"]) == 0
    assert cli.main(["score", str(store), "--reward", "human", "--dry-run"]) == 0
    assert "human-1: 0 to score, 0 already, 1 to withdraw" in capsys.readouterr().out
    assert cli.main([*own, "--undo"]) == 1
    assert "nothing to take back" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--better-than", "run-1"], "give the better one as --id"),
        (["--id", "run-1", "--better-than", "run-1"], "run-1 is one episode"),
        (["--id", "run-1", "--better-than", "failed"], "failed failed (infrastructure)"),
        (["--id", "run-1", "--better-than", "other"], "are of two tasks"),
    ],
)
def test_a_wrong_preference_leaves_nothing(
    store: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Task(id="session", environment="workspace", instruction="Write a parser.")
    store_of(store, episode(5, 0.0, id="other", task=other))
    assert cli.main(["score", str(store), *words]) == 1
    assert said in capsys.readouterr().err
    assert read(store)[1] == ()


def test_what_was_said_moves_with_the_episodes(store: Path, tmp_path: Path) -> None:
    assert cli.main(["score", str(store), "--id", "run-0", "--better-than", "run-1"]) == 0
    assert cli.main(["export", str(store), "--format", "trajectories", "--out", str(tmp_path / "all.jsonl")]) == 0
    for into, *more in (("moved", "--format", "store"), ("moved", "--format", "store"), ("of-others",)):
        assert cli.main(["import", str(tmp_path / "all.jsonl"), "--into", str(tmp_path / into), *more]) == 0
    assert read(tmp_path / "moved")[1] == read(store)[1] != ()
    assert read(tmp_path / "of-others")[1] == ()


def test_preferences_are_exported_from_where_two_attempts_part(store: Path, tmp_path: Path) -> None:
    assert cli.main(["score", str(store), "--id", "run-2", "--better-than", "run-0"]) == 0
    assert cli.main(["export", str(store), "--format", "preferences", "--out", str(tmp_path / "pairs.jsonl")]) == 0
    (row,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines())
    assert (row["trajectory_id"], row["rejected_id"], row["margin"]) == ("run-2", "run-0", None)
    assert [message["content"] for message in row["chosen"]] == ["!", "! 2"]
    assert [message["content"] for message in row["rejected"]] == ["!", "! 0"]
    assert [message["role"] for message in row["prompt"]] == ["user"]
