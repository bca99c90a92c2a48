from __future__ import annotations

import asyncio
import math
import os
import stat
from pathlib import Path

import pytest
from stored_samples import trajectory

from openhands_rl_plugin.errors import StorageError
from openhands_rl_plugin.records import TrajectoryFilter
from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from openhands_rl_plugin.storages.log import AppendLog
from openhands_rl_plugin.types import Failure, FailureKind, Score, StopReason, Trajectory

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def storage(tmp_path: Path) -> FileTrajectoryStorage:
    return FileTrajectoryStorage(tmp_path / "store")


def score(identity: str, reward: float | None, version: str = "test-1") -> Score:
    return Score(trajectory_id=identity, reward=reward, reward_version=version, detail={"why": "because"})


async def ids(storage: FileTrajectoryStorage, where: TrajectoryFilter | None = None) -> list[str]:
    return [found.id async for found, _ in storage.find(where)]


def segments(storage_folder: Path) -> list[Path]:
    return sorted((storage_folder / "trajectories").iterdir())


async def test_what_was_stored_is_read_back_equal_and_in_order(storage: FileTrajectoryStorage) -> None:
    stored = [trajectory(str(number), turns=number + 1) for number in range(40)]
    for one in stored:
        await storage.add(one)
    assert [found async for found, _ in storage.find()] == stored


async def test_an_empty_storage_has_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "store")
    assert await ids(storage) == []
    assert await storage.get("x") is None
    assert not (tmp_path / "store").exists()


async def test_adding_twice_changes_nothing(storage: FileTrajectoryStorage, tmp_path: Path) -> None:
    await asyncio.gather(*(storage.add(trajectory("a", reward=reward)) for reward in (0.1, 0.2, 0.3)))
    await storage.add(trajectory("a", reward=0.4))
    await storage.close()
    again = FileTrajectoryStorage(tmp_path / "store")
    await again.add(trajectory("a", reward=0.5))
    assert [found.episode_return async for found, _ in again.find()] == [0.1]
    assert segments(tmp_path / "store")[0].read_bytes().count(b"\n") == 1


async def test_an_id_stored_by_two_writers_is_read_once_as_it_was_first(tmp_path: Path) -> None:
    first, second = FileTrajectoryStorage(tmp_path), FileTrajectoryStorage(tmp_path)
    await second.add(trajectory("other"))
    await first.add(trajectory("a", reward=0.1))
    await second.add(trajectory("a", reward=0.9))
    assert len(segments(tmp_path)) == 2
    reader = FileTrajectoryStorage(tmp_path)
    assert [(found.id, found.episode_return) async for found, _ in reader.find()] == [("other", 0.5), ("a", 0.1)]


async def test_scores_are_appended_beside_the_trajectory(storage: FileTrajectoryStorage) -> None:
    await storage.add(trajectory("a"))
    await storage.add_scores([score("a", None), score("b", 1.0)])
    await storage.add_scores([score("a", 0.75, "test-2")])
    await storage.add_scores([])
    found = await storage.get("a")
    assert found is not None
    assert found[1] == (score("a", None), score("a", 0.75, "test-2"))


async def test_numbers_that_json_does_not_know_come_back_as_they_were(storage: FileTrajectoryStorage) -> None:
    await storage.add(trajectory("a", reward=math.nan))
    await storage.add_scores([score("a", math.inf)])
    found = await storage.get("a")
    assert found is not None
    assert math.isnan(found[0].episode_return)
    assert found[1][0].reward == math.inf


FILTERS = [
    (TrajectoryFilter(run_id="other"), {"run"}),
    (TrajectoryFilter(group_id="other"), {"group"}),
    (TrajectoryFilter(task_id="goal-2"), {"task"}),
    (TrajectoryFilter(environment="../etc/passwd"), {"environment"}),
    (TrajectoryFilter(split="held-out"), {"split"}),
    (TrajectoryFilter(strategy="Other"), {"strategy"}),
    (TrajectoryFilter(policy_version=8), {"version"}),
    (TrajectoryFilter(stop=StopReason.MAX_TURNS), {"stop"}),
    (TrajectoryFilter(failed=True), {"failed"}),
    (TrajectoryFilter(reward_at_least=0.6), {"return", "scored"}),
    (TrajectoryFilter(reward_at_most=0.4), {"low"}),
    (TrajectoryFilter(reward_at_least=0.8, reward_at_most=0.8), {"return"}),
    (TrajectoryFilter(since=1_763_700_003.0), {"late"}),
    (TrajectoryFilter(until=1_763_700_001.0), {"early"}),
    (TrajectoryFilter(ids=("late", "run", "nobody", "run")), {"late", "run"}),
    (TrajectoryFilter(ids=()), set()),
    (TrajectoryFilter(run_id="run", environment="webshop", limit=2, failed=False), {"group", "task"}),
    (TrajectoryFilter(limit=0), set()),
]


@pytest.mark.parametrize(("where", "expected"), FILTERS, ids=lambda value: str(value) if isinstance(value, set) else "")
async def test_find_returns_what_matches(
    storage: FileTrajectoryStorage, where: TrajectoryFilter, expected: set[str]
) -> None:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="gone", boundary="environment.step")
    for one in (
        trajectory("run", run_id="other"),
        trajectory("group", group_id="other"),
        trajectory("task", task_id="goal-2"),
        trajectory("environment", environment="../etc/passwd"),
        trajectory("split", split="held-out"),
        trajectory("strategy", strategy="Other"),
        trajectory("version", version=8),
        trajectory("stop", stop=StopReason.MAX_TURNS),
        trajectory("failed", failure=failure),
        trajectory("return", reward=0.8),
        trajectory("scored", reward=0.0),
        trajectory("low", reward=0.4),
        trajectory("unknown", reward=0.9),
        trajectory("late", finished=1_763_700_003.0),
        trajectory("early", finished=1_763_700_001.0),
    ):
        await storage.add(one)
    await storage.add_scores([score("scored", 0.0), score("unknown", 0.9), score("scored", 1.0)])
    await storage.add_scores([score("unknown", None, "the newest one could not say")])
    assert set(await ids(storage, where)) == expected


async def test_a_stream_can_be_left_early_and_ignores_later_additions(storage: FileTrajectoryStorage) -> None:
    for number in range(50):
        await storage.add(trajectory(str(number)))
    seen = []
    async for found, _ in storage.find():
        await storage.add(trajectory(f"later-{len(seen)}"))
        seen.append(found.id)
        if len(seen) == 40:
            break
    assert seen == [str(number) for number in range(40)]


async def test_files_are_private_and_no_name_becomes_a_path(tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "deep" / "store")
    await storage.add(trajectory("../../id", environment="../../outside", run_id="/abs", task_id="../task"))
    await storage.add_scores([score("../../id", 1.0)])
    made = list(tmp_path.rglob("*"))
    assert {path.relative_to(tmp_path).parts[2] for path in made if path.is_file()} == {"trajectories", "scores"}
    for path in made:
        expected = 0o600 if path.is_file() else 0o700
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert await ids(storage) == ["../../id"]


async def test_half_a_record_is_not_read_and_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        await storage.add(trajectory("whole"))
        await storage.add(trajectory("torn"))
    (segment,) = segments(tmp_path)
    complete = segment.read_bytes()
    for missing in (1, 2, 50, 400):
        segment.write_bytes(complete[:-missing])
        assert await ids(FileTrajectoryStorage(tmp_path)) == ["whole"]
        async with FileTrajectoryStorage(tmp_path) as writer:
            await writer.add(trajectory("next"))
        assert await ids(FileTrajectoryStorage(tmp_path)) == ["whole", "next"]
    assert segments(tmp_path) == [segment]


async def test_damage_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        await storage.add(trajectory("a"))
        await storage.add(trajectory("b"))
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes().replace(b"red mug", b"red mud", 1))
    with pytest.raises(StorageError, match=r"damaged at byte 0: the checksum"):
        await ids(FileTrajectoryStorage(tmp_path))
    with pytest.raises(StorageError, match="damaged"):
        await FileTrajectoryStorage(tmp_path).add(trajectory("c"))


async def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    newer = trajectory("a").model_dump_json().replace('"schema_version":1', '"schema_version":2,"new":1')
    AppendLog(tmp_path / "trajectories", unique=True).append([("a", newer.encode())])
    with pytest.raises(StorageError, match=r"schema version 2.*upgrade openhands_rl_plugin"):
        await ids(FileTrajectoryStorage(tmp_path))


async def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot be used.*\[rl.storage\]"):
        await FileTrajectoryStorage(tmp_path / "file" / "store").add(trajectory("a"))


async def test_a_failed_write_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    storage = FileTrajectoryStorage(tmp_path / "store")
    with pytest.raises(StorageError):
        await storage.add(trajectory("a"))
    (tmp_path / "store").unlink()
    await storage.add(trajectory("b"))
    assert await ids(storage) == ["b"]


async def test_a_removed_segment_is_forgotten(tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path)
    await storage.add(trajectory("a"))
    await storage.close()
    segments(tmp_path)[0].unlink()
    assert await ids(storage) == []
    await storage.add(trajectory("a"))
    assert await ids(storage) == ["a"]


def test_segments_are_finished_at_their_size_and_an_unfinished_one_is_taken_up(tmp_path: Path) -> None:
    document = b'{"text":"%s"}' % (b"x" * 400)
    for number in range(10):
        log = AppendLog(tmp_path, unique=True, segment_bytes=1000)
        log.append([(str(number), document)])
        log.close()
    assert [path.read_bytes().count(b"\n") for path in sorted(tmp_path.iterdir())] == [3, 3, 3, 1]
    log = AppendLog(tmp_path, unique=True)
    log.refresh()
    assert [entry.id for entry in log.entries()] == [str(number) for number in range(10)]
    assert list(log.read(log.entries())) == [document] * 10


async def test_appends_that_arrive_together_share_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = 0
    real = os.fdatasync

    def count(descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        real(descriptor)

    monkeypatch.setattr("openhands_rl_plugin.storages.log._flush_to_disk", count)
    storage = FileTrajectoryStorage(tmp_path)
    await asyncio.gather(*(storage.add(trajectory(str(number))) for number in range(64)))
    assert 1 <= flushes <= 8
    assert len(await ids(storage)) == 64


async def test_the_first_schema_version_can_still_be_read() -> None:
    storage = FileTrajectoryStorage(GOLDEN / "version-1")
    found = [pair async for pair in storage.find()]
    assert [(one.id, one.schema_version, len(scores)) for one, scores in found] == [("react", 1, 2), ("failed", 1, 0)]
    react, failed = found[0][0], found[1][0]
    assert isinstance(react, Trajectory) and react == trajectory("react", turns=2)
    assert failed.failure is not None and failed.failure.kind is FailureKind.INFRASTRUCTURE
    assert [one.reward for one in found[0][1]] == [0.5, None]
