"""``score --value`` is the outcome, a label is not: ``score --reward human`` makes scores of what people labelled.
All of it may be withdrawn, and is asked for once. So is which of two attempts is better."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from train_store import episode, store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.judgements import opinions, preferences
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Failure, FailureKind, Message, Score, Task, Trajectory
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


def label(store: Path, typed: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return cli.main(["score", str(store), "--ask", *words])


def human(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float | None]:
    """What ``score --reward human`` makes of the labels."""
    assert cli.main(["score", str(store), "--reward", "human"]) == 0
    capsys.readouterr()
    scores, _ = read(store)
    return {name: opinions(each).get("human") for name, each in scores.items()}


def test_episodes_are_labelled_one_after_another_and_each_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rewards(store, capsys)
    assert label(store, "y tests pass\nq\n", monkeypatch) == 0
    said = capsys.readouterr().out
    assert "Mend the parser." in said and "+line 0" in said and "assistant: !" in said
    assert said.count("solved? [y]es, [n]o, a number") == 2 and "which is better" not in said
    assert "1 labelled" in said
    assert label(store, "maybe\ns\n0.25\n", monkeypatch) == 0, "the end of the input quits"
    said = capsys.readouterr().out
    assert "'maybe' is none of y, n, s, u, m, q or a number" in said and "+line 0" not in said and "1 labelled" in said
    scores, labels = read(store)
    assert rewards(store, capsys) == before and all(not scores[f"run-{at}"] for at in range(3)), "a label is no reward"
    assert {(each.kind, each.text) for each in labels if each.trajectory_id == "run-1"} == {(LabelKind.TAG, "skipped")}
    assert label(store, "", monkeypatch) == 0
    assert "0 labelled of 4 that match, 4 judged before;" in capsys.readouterr().out, "nothing is left to ask"
    assert human(store, capsys) == {"run-0": 1.0, "run-1": None, "run-2": 0.25, "run-3": None, "failed": None}
    assert rewards(store, capsys) == before, "what people think stands in a column of its own"
    assert label(store, "n\n", monkeypatch, "--again", "--task", "session") == 0
    assert human(store, capsys)["run-0"] == 0.0


def test_the_last_label_is_taken_back_and_the_one_before_holds_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert label(store, "1\nn\nu\ny fine after all\nm look at the tests\ns\nq\n", monkeypatch) == 0
    assert "taken back: verdict 0 of run-1" in (said := capsys.readouterr().out) and said.count("+line 1") == 2
    assert human(store, capsys) == {"run-0": 1.0, "run-1": 1.0, "run-2": None, "run-3": None, "failed": None}
    assert cli.main(["show", str(store), "run-2"]) == 0
    assert "look at the tests" in capsys.readouterr().out
    assert cli.main(["score", str(store), "--undo"]) == 0
    assert "taken back: skipped of run-2" in capsys.readouterr().out
    assert label(store, "n\nq\n", monkeypatch) == 0
    assert human(store, capsys)["run-2"] == 0.0
    assert cli.main(["score", str(store), "--id", "run-0", "--value", "0.25"]) == 0
    assert (rewards(store, capsys)["run-0"], human(store, capsys)["run-0"]) == (0.25, 0.25)
    assert cli.main(["score", str(store), "--undo"]) == 0
    assert "taken back: verdict 0.25 of run-0" in capsys.readouterr().out
    assert (rewards(store, capsys)["run-0"], human(store, capsys)["run-0"]) == (None, 1.0), "what was said before"
    for _ in range(4):  # of run-2 the verdict and the comment, of run-1 and run-0 the verdicts
        assert cli.main(["score", str(store), "--undo"]) == 0
    assert cli.main(["score", str(store), "--reward", "human", "--dry-run"]) == 0
    assert "human-1: 0 to score, 0 already, 3 to withdraw" in capsys.readouterr().out
    assert set(human(store, capsys).values()) == {None}
    assert cli.main(["score", str(store), "--undo"]) == 1
    assert "nothing to take back" in capsys.readouterr().out
    assert cli.main(["show", str(store), "run-2"]) == 0
    assert "look at the tests" not in capsys.readouterr().out
    assert set(rewards(store, capsys).values()) == {None, 1.0}


def test_attempts_at_one_task_are_compared_and_each_pair_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert label(store, "1 shorter\n=\nu\n3\n2\nq\n", monkeypatch, "pairs") == 0
    said = capsys.readouterr().out
    assert "which is better? [1], [2], [=] alike" in said and "solved?" not in said
    assert "3 of 3: 2" in said and "policy" not in said and "'3' is none of 1, 2, =, s, u, q" in said
    assert "taken back: preference 0.5" in said and "2 labelled" in said
    found = preferences(read(store)[1])
    assert set(found) == {frozenset(("run-0", "run-1")), frozenset(("run-1", "run-2"))} and None not in found.values()
    assert label(store, "s\n", monkeypatch, "pairs") == 0
    assert "3 of 3: 2" in capsys.readouterr().out
    assert label(store, "", monkeypatch, "pairs") == 0
    assert "which is better" not in capsys.readouterr().out, "nothing is left to ask"
    assert label(store, "", monkeypatch) == 0
    assert "1 of 4" in capsys.readouterr().out, "two that were skipped are still asked for one by one"


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
