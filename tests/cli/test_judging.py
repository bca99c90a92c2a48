"""``score --value`` and ``label``: a person's verdict is the outcome, may be withdrawn, and is asked for once."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from train_store import episode, store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Failure, FailureKind, Score, Task, Trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SESSION = Task(id="session", environment="workspace", instruction="Mend the parser.")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three ordinary runs that nobody judged, one that a grader did, and one that failed."""
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    runs = [episode(at, 0.0, id=f"run-{at}", task=SESSION, evidence={"git_patch": f"+line {at}"}) for at in range(4)]
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


def rewards(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float | None]:
    capsys.readouterr()
    assert cli.main(["list", str(store), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["id"]: row["reward"] for row in rows}


def test_what_nobody_judged_is_a_dash_and_no_part_of_a_rate(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rewards(store, capsys) == {"run-0": None, "run-1": None, "run-2": None, "run-3": 1.0, "failed": None}
    assert cli.main(["stats", str(store), "--by", "run", "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["episodes"], figures["valid"], figures["success"]["mean"]) == (5, 1, 1.0)
    assert cli.main(["show", str(store), "run-0"]) == 0
    assert "return -" in capsys.readouterr().out


def test_a_verdict_is_the_outcome_until_it_is_withdrawn(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", str(store), "--id", "run-0", "--id", "run-3"]
    assert cli.main([*words, "--value", "0.5", "--note", "half of it"]) == 0
    assert capsys.readouterr().out == "run-0: 0.5\nrun-3: 0.5\n"
    assert rewards(store, capsys)["run-0"] == rewards(store, capsys)["run-3"] == 0.5
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
        (["--reward", "return", "--id", "run-0"], "give --value X too"),
    ],
)
def test_a_wrong_verdict_leaves_nothing(
    store: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["score", str(store), *words]) == 1
    assert said in capsys.readouterr().err
    assert rewards(store, capsys)["run-0"] is None


def label(store: Path, typed: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return cli.main(["label", str(store), *words])


def test_episodes_are_judged_one_after_another_and_each_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert label(store, "y tests pass\nq\n", monkeypatch) == 0
    said = capsys.readouterr().out
    assert "Mend the parser." in said and "+line 0" in said and "assistant: !" in said and "1 judged" in said
    assert label(store, "maybe\ns\n0.25\n", monkeypatch) == 0, "the end of the input quits"
    said = capsys.readouterr().out
    assert "'maybe' is none of y, n, s, q or a number" in said and "+line 0" not in said and "1 judged" in said
    assert rewards(store, capsys) == {"run-0": 1.0, "run-1": None, "run-2": 0.25, "run-3": 1.0, "failed": None}
    scores, labels = read(store)
    assert scores["run-0"][0].detail["note"] == "tests pass"
    assert {(each.kind, each.text) for each in labels if each.trajectory_id == "run-1"} == {(LabelKind.TAG, "skipped")}
    assert label(store, "", monkeypatch) == 0
    assert "0 judged" in capsys.readouterr().out, "nothing is left to ask"
    assert label(store, "n\n", monkeypatch, "--again", "--min-reward", "0.9") == 0
    assert rewards(store, capsys)["run-0"] == 0.0
