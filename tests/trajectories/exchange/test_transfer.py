"""The commands, with a real file store."""

from __future__ import annotations

import asyncio
import gzip
import json
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from exchange_samples import CODE, SHOP, score, trajectory

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart, TrajectoryFilter
from openhands_rl_plugin.core.types import Failure, FailureKind, Message, Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import Imported
from openhands_rl_plugin.trajectories.exchange.formats import FORMATS
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

Stored = list[tuple[Trajectory, tuple[Score, ...]]]

SOLVED = trajectory(identity="00000000-0000-4000-8000-00000000000a", evidence={"git_patch": "diff\n"})
UNSOLVED = trajectory(CODE[:5], identity="00000000-0000-4000-8000-00000000000b", task_id="repo__repo-2")
SHOPPED = trajectory(
    SHOP,
    identity="00000000-0000-4000-8000-00000000000c",
    environment="webshop",
    task_id="6",
    reward=0.75,
    unsampled=(1,),
)
FAILED = trajectory(
    CODE[:4],
    identity="00000000-0000-4000-8000-00000000000d",
    stop=StopReason.ERROR,
    failure=Failure(kind=FailureKind.INFRASTRUCTURE, message="gone", boundary="b"),
)
UNFINISHED = trajectory(CODE[:3], identity="00000000-0000-4000-8000-00000000000e", stop=StopReason.UNFINISHED)
ROW = {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Done."}]}
SCORES = (score(SOLVED, 0.5), score(SOLVED, 1.0, resolved=True), score(UNSOLVED, 0.25, resolved=False))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with FileTrajectoryStorage(tmp_path / "store", durable=False) as storage:
            for each in (SOLVED, UNSOLVED, SHOPPED, FAILED):
                await storage.add(each)
            await storage.begin(EpisodeStart.of(UNFINISHED))
            await storage.grow(
                EpisodeGrowth(trajectory_id=UNFINISHED.id, first=0, nodes=UNFINISHED.nodes, head=UNFINISHED.head)
            )
            await storage.add_scores(SCORES)

    asyncio.run(fill())
    return tmp_path / "store"


def stored(path: Path) -> Stored:
    async def read() -> Stored:
        async with FileTrajectoryStorage(path) as storage:
            return [pair async for pair in storage.find(TrajectoryFilter(finished=None))]

    return sorted(asyncio.run(read()), key=lambda pair: pair[0].id)


def run(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


def rows(file: Path) -> list[dict[str, object]]:
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_stores_move_without_loss(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.jsonl.gz"
    assert run("export", store, "--format", "trajectories", "--out", out) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    for _ in range(2):
        assert run("import", out, "--format", "store", "--into", tmp_path / "other") == 0
    # When an episode that has not ended grew last is known to its own store only.
    *ended, (unfinished, _) = stored(store)
    *again, (other, _) = stored(tmp_path / "other")
    assert again == ended and other.model_copy(update={"times": unfinished.times}) == unfinished
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].endswith("5 new trajectories of 5 records, 3 scores")
    assert printed[-1].endswith("0 new trajectories of 5 records, 0 scores")


def test_an_episode_that_ended_meanwhile_takes_its_place(store: Path, tmp_path: Path) -> None:
    out, ended = tmp_path / "all.jsonl", tmp_path / "ended.jsonl"
    run("export", store, "--format", "trajectories", "--out", out)
    run("import", out, "--format", "store", "--into", tmp_path / "other")
    (line,) = [row for row in rows(out) if row["trajectory"]["stop"] == "unfinished"]
    line["trajectory"]["stop"] = "terminated"
    ended.write_text(json.dumps(line))
    run("import", ended, "--format", "store", "--into", tmp_path / "other")
    assert [each.stop for each, _ in stored(tmp_path / "other") if each.id == UNFINISHED.id] == [StopReason.TERMINATED]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [SOLVED, UNSOLVED, SHOPPED]),
        (("--resolved",), [SOLVED]),
        (("--min-reward", "0.6"), [SOLVED, SHOPPED]),
        (("--no-resolved", "--limit", "1"), [UNSOLVED]),
        (("--failed",), [FAILED]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_filters(store: Path, tmp_path: Path, words: Sequence[str], expected: Sequence[Trajectory]) -> None:
    out = tmp_path / "sft.jsonl"
    assert run("export", store, "--format", "sft-native", "--out", out, *words) == 0
    assert [row["trajectory_id"] for row in rows(out)] == [each.id for each in expected]


@pytest.mark.parametrize("name", [each.name for each in FORMATS.values() if each.read and each.rows])
def test_every_format_goes_out_and_in_and_in_again(
    store: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert run("export", store, "--format", name, "--out", out) == 0
    for _ in range(2):
        assert run("import", out, "--format", name, "--into", tmp_path / "other") == 0
    again = stored(tmp_path / "other")
    assert again
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith(f"0 new trajectories of {len(again)} records, 0 scores")
    if name != "trajectories":
        assert all(each.strategy.name == "imported" for each, _ in again)
        assert all(node.tokens is None for each, _ in again for node in each.nodes) == (name != "atif")
        assert sum(any(node.sampled for node in each.nodes) for each, _ in again) == len(again)


def test_secrets_never_leave(tmp_path: Path) -> None:
    secret = "sk-" + "Zx81kQ0pLm3VbN7tRw5YcE2aHd9GfJ4s" * 2
    leaking = (
        Message(role="user", content=f"OPENAI_API_KEY={secret}"),
        Message(role="assistant", content=f"Authorization: Bearer {secret}"),
    )

    async def fill() -> None:
        async with FileTrajectoryStorage(tmp_path / "store", durable=False) as storage:
            await storage.add(trajectory(leaking, evidence={"git_patch": f"+key = '{secret}'"}))

    asyncio.run(fill())
    for name in ("sft-text", "sft-native", "output-jsonl", "atif", "predictions", "trajectories"):
        out = tmp_path / f"{name}.jsonl"
        assert run("export", tmp_path / "store", "--format", name, "--out", out) == 0
        assert out.stat().st_size > 0 and secret not in out.read_text()


def test_shapes_of_files(tmp_path: Path) -> None:
    records = [{"instance_id": name, **ROW} for name in "abcdefgh"]
    lines, folder = [json.dumps(record) for record in records], tmp_path / "records" / "below"
    folder.mkdir(parents=True)
    (folder / "lines.json").write_text("\n".join(lines[:2]))
    (folder / "marked.json").write_text(f"\ufeff{lines[2]}\n{lines[3]}")
    (folder / "array.json").write_text(json.dumps(records[4:6], indent=1))
    (folder / "pretty.json").write_text(json.dumps(records[6], indent=1))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines[7].encode()))
    assert run("import", folder.parent, "--format", "sft-native", "--into", tmp_path / "store") == 0
    assert sorted(each.task.id for each, _ in stored(tmp_path / "store")) == [*"abcdefgh"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("export", "STORE", "--format", "sft-txt", "--out", "x"), "unknown format 'sft-txt'; available: "),
        (("import", "STORE", "--format", "verifier", "--into", "x"), "'verifier' is for export only"),
        (("export", "STORE", "--format", "atif", "--out", "x.parquet"), "has no fixed columns for Parquet"),
        (
            ("import", "STORE", "--format", "atif", "--into", "mongodb://u:secret@h/db"),
            "other users can see a password",
        ),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else value,
)
def test_wrong_use_is_one_clear_line(
    store: Path, words: Sequence[str], wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "import" in words and "STORE" in words:
        (store / "row.json").write_text("{}")
    monkeypatch.chdir(store.parent)
    assert run(*(word.replace("STORE", str(store)) for word in words)) == 1
    error = capsys.readouterr().err
    assert wanted.replace("STORE", str(store)) in error and error.count("\n") == 1 and "secret" not in error


def test_a_failed_export_leaves_the_old_file(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sft.jsonl"
    out.write_text("old")

    def broken(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("openhands_rl_plugin.trajectories.exchange.formats.resolved", broken)
    assert run("export", store, "--format", "sft-native", "--out", out, "--resolved") == 130
    assert out.read_text() == "old" and {each.name for each in tmp_path.iterdir()} == {"store", "sft.jsonl"}


@pytest.mark.parametrize("name", ["sft-text", "sft-native"])
def test_parquet_holds_the_same_rows(store: Path, tmp_path: Path, name: str) -> None:
    for ending in ("parquet", "jsonl"):
        assert run("export", store, "--format", name, "--out", tmp_path / f"rows.{ending}") == 0
        assert run("import", tmp_path / f"rows.{ending}", "--format", name, "--into", tmp_path / ending) == 0
    assert stored(tmp_path / "parquet") == stored(tmp_path / "jsonl") != []


def test_scores_are_added_once_whatever_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5uV7wX9yZ1"
    odd = Score(trajectory_id=SOLVED.id, reward=0.25, detail={"log": f"the key {key}"}, reward_version="v1")
    plain = score(SOLVED, 1.0)
    lines = [(odd, plain, plain), (plain, score(SOLVED, 0.5))]
    file = tmp_path / "scored.jsonl"
    text = [Imported(trajectory=SOLVED, scores=scores).model_dump_json() for scores in lines]
    file.write_text("\n".join(text))
    for expected in ("4 scores", "0 scores"):
        run("import", file, "--format", "store", "--into", tmp_path / "store")
        assert capsys.readouterr().out.endswith(f"{expected}\n")
    ((_, scores),) = stored(tmp_path / "store")
    assert [each.reward for each in scores[1:]] == [1.0, 1.0, 0.5]
