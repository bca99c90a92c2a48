"""``score --value`` is the outcome, a label is not: ``score --reward human`` makes scores of what people labelled.

What people and verifiers think has columns of its own, and is a reward for who names it only. All of it may be
withdrawn. So may a preference between two attempts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from train_store import episode, store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Failure, FailureKind, Message, Score, Task
from openhands_rl_plugin.rollout.scoring import add_label
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SESSION = Task(id="session", environment="workspace", instruction="Mend the parser.")
Capture = pytest.CaptureFixture[str]


def stored(folder: Path, change: Callable[[FileTrajectoryStorage], Awaitable[object]]) -> object:
    async def opened() -> object:
        async with FileTrajectoryStorage(folder) as storage:
            return await change(storage)

    return asyncio.run(opened())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three ordinary runs that nobody judged, one that a grader did, and one that failed."""
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    runs = [episode(at, 0.0, id=f"run-{at}", task=SESSION, evidence={"git_patch": f"+line {at}"}) for at in range(4)]
    for at, run in enumerate(runs):
        last = run.nodes[-1].model_copy(update={"message": Message(role="assistant", content=f"! {at}")})
        runs[at] = run.model_copy(update={"nodes": (*run.nodes[:-1], last)})
    folder = store_of(tmp_path / "store", *runs, episode(4, 0.0, id="failed", failure=failure))
    graded = Score(trajectory_id="run-3", reward=1.0, reward_version="tests-1")
    stored(folder, lambda storage: storage.add_scores([graded]))
    return folder


def labels(store: Path) -> tuple[Label, ...]:
    found = stored(store, lambda storage: storage.labels([*(f"run-{at}" for at in range(4)), "other"]))
    assert isinstance(found, tuple)
    return found


def rewards(store: Path, capsys: Capture, *words: str) -> dict[str, float | None]:
    capsys.readouterr()
    assert cli.main(["list", str(store), "--json", *words]) == 0
    return {row["id"]: row["reward"] for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_a_score_by_hand_is_the_outcome_until_it_is_withdrawn(store: Path, capsys: Capture) -> None:
    unjudged = {"run-0": None, "run-1": None, "run-2": None, "run-3": 1.0, "failed": None}
    assert rewards(store, capsys) == unjudged
    assert cli.main(["list", str(store), "--by", "run", "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["episodes"], figures["valid"], figures["success"]["mean"]) == (5, 1, 1.0), "no part of a rate"
    words = ["score", str(store), "--id", "run-0", "--id", "run-3"]
    assert cli.main([*words, "--value", "0.5", "--note", "half of it"]) == 0
    assert capsys.readouterr().out == "run-0: 0.5\nrun-3: 0.5\n"
    assert rewards(store, capsys, "--labelled", "verdict") == {"run-0": 0.5, "run-3": 0.5}
    kept = [(label.kind, label.value, label.text) for label in labels(store)]
    assert kept == [(LabelKind.VERDICT, 0.5, "half of it")] * 2
    assert cli.main([*words, "--value", "none"]) == 0
    assert rewards(store, capsys) == unjudged


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--value", "1"], "--id and --note go with --value"),
        (["--value", "1", "--id", "run-0", "--id", "nobody"], "no episode has an id that begins with 'nobody'"),
        (["--value", "1", "--id", "failed"], "failed failed (infrastructure)"),
        (["--reward", "return", "--id", "run-0"], "--id and --note go with --value"),
        (["--reward", "return", "--note", "all tests pass"], "--id and --note go with --value"),
        (["--better-than", "run-1"], "--id and --note go with --value"),
        (["--id", "run-1", "--better-than", "other"], "are not two attempts at one task"),
    ],
)
def test_a_wrong_judgement_leaves_nothing(store: Path, words: list[str], why: str, capsys: Capture) -> None:
    other = Task(id="session", environment="workspace", instruction="Write a parser.")
    store_of(store, episode(5, 0.0, id="other", task=other))
    assert cli.main(["score", str(store), *words]) == 1
    assert why in capsys.readouterr().err
    assert labels(store) == ()


def test_labels_and_verifiers_have_columns_and_are_rewards_for_who_names_them(store: Path, capsys: Capture) -> None:
    async def judge(storage: FileTrajectoryStorage) -> None:
        for at in range(3):
            thought = Score(trajectory_id=f"run-{at}", reward=0.25 * at, reward_version="verifier-1@x")
            outcome = Score(trajectory_id=f"run-{at}", reward=float(at != 1), reward_version="tests-1")
            await storage.add_scores([outcome, thought])
        for run, author, value in (("run-0", "ann", 0.0), ("run-1", "ann", 1.0), ("run-1", "bob", 0.0)):
            await add_label(storage, run, LabelKind.VERDICT, value=value, author=author)
        await add_label(storage, "run-1", LabelKind.VERDICT, value=1.0, author="cay")

    stored(store, judge)
    assert cli.main(["score", str(store), "--reward", "human"]) == 0
    shown = ["--task", "session", "--limit", "3"]
    assert rewards(store, capsys, *shown) == {"run-0": 1.0, "run-1": 0.0, "run-2": 1.0}
    assert cli.main(["list", str(store), *shown]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = head.index("reward")
    assert head[at : at + 3] == ["reward", "human", "verifier"]
    assert [row[at : at + 3] for row in rows[:3]] == [["1", "0", "0"], ["0", "1", "0.25"], ["1", "-", "0.5"]]
    human = ["--reward", "human"]
    assert [*rewards(store, capsys, *human, "--sort", "reward", "--desc")][:2] == ["run-1", "run-0"]
    assert rewards(store, capsys, *human, "--min-reward", "0.5") == {"run-1": 1.0}
    assert rewards(store, capsys, "--reward", "verifier", "--max-reward", "0.3") == {"run-0": 0.0, "run-1": 0.25}
    by = ["list", str(store), "--by", "run", "--json"]
    for words, valid, mean in (([], 4, 0.75), (human, 2, 0.5)):
        capsys.readouterr()
        assert cli.main([*by, *words]) == 0
        (figures,) = json.loads(capsys.readouterr().out)
        assert (figures["valid"], figures["reward"]["mean"]) == (valid, mean)


def test_a_score_by_hand_is_not_what_people_labelled(store: Path, capsys: Capture) -> None:
    stored(store, lambda storage: add_label(storage, "run-0", LabelKind.VERDICT, value=1.0, author="ann"))

    def both() -> tuple[float | None, float | None]:
        assert cli.main(["score", str(store), "--reward", "human"]) == 0
        return rewards(store, capsys)["run-0"], rewards(store, capsys, "--reward", "human")["run-0"]

    own = ["score", str(store), "--author", "ann", "--id", "run-0", "--value", "0.25"]
    assert cli.main([*own, "--dry-run"]) == 1 and both() == (None, 1.0)
    assert cli.main(own) == 0
    assert both() == (0.25, 0.25)


def test_preferences_move_with_the_episodes_and_are_exported_from_where_attempts_part(
    store: Path, tmp_path: Path
) -> None:
    assert cli.main(["score", str(store), "--id", "run-2", "--better-than", "run-0"]) == 0
    everything, pairs = str(tmp_path / "all.jsonl"), tmp_path / "pairs.jsonl"
    assert cli.main(["export", str(store), "--format", "trajectories", "--out", everything]) == 0
    for into, *more in (("moved", "--format", "store"), ("moved", "--format", "store"), ("of-others",)):
        assert cli.main(["import", everything, "--into", str(tmp_path / into), *more]) == 0
    assert labels(tmp_path / "moved") == labels(store) != ()
    assert labels(tmp_path / "of-others") == ()
    assert cli.main(["export", str(store), "--format", "preferences", "--out", str(pairs)]) == 0
    (row,) = map(json.loads, pairs.read_text(encoding="utf-8").splitlines())
    assert (row["trajectory_id"], row["rejected_id"], row["margin"]) == ("run-2", "run-0", None)
    assert [message["content"] for message in row["chosen"]] == ["!", "! 2"]
    assert [message["content"] for message in row["rejected"]] == ["!", "! 0"]
    assert [message["role"] for message in row["prompt"]] == ["user"]
