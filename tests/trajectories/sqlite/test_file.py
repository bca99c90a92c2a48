"""What is particular to the file storage; the rules of all storages are in ``test_conformance.py``."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from stored_samples import play, trajectory

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, NodeMark, TrajectoryFilter
from openhands_rl_plugin.core.types import Message, Node, Score, StopReason, Trajectory
from openhands_rl_plugin.testing.samples import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.sqlite import storage as file_module
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, FileTrajectoryStorage

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def storage(tmp_path: Path) -> FileTrajectoryStorage:
    return FileTrajectoryStorage(tmp_path / "store")


async def ids(storage: FileTrajectoryStorage, where: TrajectoryFilter | None = None) -> list[str]:
    return [found.id async for found, _ in storage.find(where)]


async def closed_store(folder: Path, *identities: str) -> Path:
    async with FileTrajectoryStorage(folder) as storage:
        for identity in identities:
            await storage.add(trajectory(identity))
    return folder / FILE_NAME


async def test_an_empty_storage_has_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "store")
    assert await ids(storage) == []
    assert await storage.get("x") is None
    assert await storage.count() == 0
    await storage.close()
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("odd", [math.nan, -math.inf, 1e300])
async def test_a_number_that_no_value_has_is_a_damaged_record(odd: float, tmp_path: Path) -> None:
    """As an earlier release stored it: it is in no baseline, and its line says which number it is."""
    async with FileTrajectoryStorage(tmp_path) as storage:
        await storage.add(trajectory("a"))
        await storage.add_scores([sample_score("a", 0.5).model_copy(update={"reward": odd})])
        with pytest.raises(StorageError, match=r"record 'a' is not a Score: Score\.reward: "):
            [found async for found in storage.find()]


async def test_no_text_is_taken_for_a_query(storage: FileTrajectoryStorage) -> None:
    odd = "'; DROP TABLE episodes; --\"%_?"
    await storage.add(trajectory(odd, run_id=odd, environment=odd, task_id=odd, strategy=odd, split=odd, group_id=odd))
    await storage.add(trajectory("other"))
    where = TrajectoryFilter(
        ids=(odd,), run_id=odd, environment=odd, task_id=odd, strategy=odd, split=odd, group_id=odd
    )
    assert await ids(storage, where) == [odd]
    assert await ids(storage, TrajectoryFilter(run_id="%")) == []
    assert await ids(storage, TrajectoryFilter(ids=(odd, *map(str, range(40_000))))) == [odd]


async def test_what_is_dropped_while_a_stream_is_read_is_left_out(storage: FileTrajectoryStorage) -> None:
    for number in range(64):
        await play(storage, steps_of(sample_episode(str(number)))[:2])
    stream = storage.find(TrajectoryFilter(finished=False))
    seen = [(await anext(stream))[0].id]
    # The stream has read on a little, but not as far as that.
    assert await storage.drop([str(number) for number in range(40, 64)]) == 24
    seen += [found.id async for found, _ in stream]
    assert seen == [str(number) for number in range(40)]


async def test_files_are_private_and_no_name_becomes_a_path(tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "deep" / "store")
    await storage.add(trajectory("../../id", environment="../../outside", run_id="/abs", task_id="../task"))
    await storage.add_scores([sample_score("../../id", 1.0)])
    made = list(tmp_path.rglob("*"))
    assert {path.name for path in made if path.is_file()} == {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}
    for path in made:
        expected = 0o600 if path.is_file() else 0o700
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    await storage.close()
    assert [path.name for path in (tmp_path / "deep" / "store").iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)], ids=["full", "normal"])
async def test_calls_that_wait_together_share_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, level: int
) -> None:
    statements: list[str] = []
    levels: list[int] = []
    real = file_module.connect

    def traced(file: Path, *, durable: bool = True) -> sqlite3.Connection:
        connection = real(file, durable=durable)
        connection.set_trace_callback(statements.append)
        levels.append(connection.execute("PRAGMA synchronous").fetchone()[0])
        return connection

    monkeypatch.setattr(file_module, "connect", traced)
    storage = FileTrajectoryStorage(tmp_path, durable=durable)
    await asyncio.gather(*(storage.add(trajectory(str(number))) for number in range(64)))
    assert levels == [level]  # 2 flushes every commit, 1 does not
    assert 1 <= statements.count("COMMIT") <= 8
    assert len(await ids(storage)) == 64


async def test_a_call_that_fails_leaves_those_beside_it_alone(storage: FileTrajectoryStorage) -> None:
    await play(storage, steps_of(sample_episode("open"))[:2])
    gap = EpisodeGrowth(trajectory_id="open", first=9, nodes=(Node(parent=None, message=Message(role="user")),))
    huge = trajectory("huge").model_copy(update={"usage": trajectory("huge").usage.model_copy(update={"steps": 2**70})})
    results = await asyncio.gather(
        storage.add(trajectory("before")),
        storage.grow(gap),
        storage.add(huge),
        storage.end(EpisodeEnd.model_validate({**steps_of(sample_episode("x"))[-1].model_dump()})),
        storage.add(trajectory("after")),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), StorageError, StorageError, StorageError, type(None)]
    assert "has 3 nodes and cannot grow from node 9" in str(results[1])
    assert await ids(storage) == ["before", "after"]
    assert await storage.add_scores([sample_score("huge", 1.0)]) is None  # nothing of it was stored
    await storage.add(trajectory("huge"))
    assert await ids(storage) == ["before", "after", "huge"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"head": 99},
        {"marks": (NodeMark(index=5, reward=1.0),)},
        {"nodes": (Node(parent=7, message=Message(role="user")),)},
    ],
    ids=["head", "mark", "parent"],
)
async def test_a_wrong_growth_changes_nothing(storage: FileTrajectoryStorage, wrong: dict[str, object]) -> None:
    sample = sample_episode("a")
    start, first, second, *rest = steps_of(sample)
    assert isinstance(second, EpisodeGrowth)
    await play(storage, (start, first))
    with pytest.raises(StorageError):
        await storage.grow(EpisodeGrowth.model_validate({"trajectory_id": "a", "first": 3, "head": 1} | wrong))
    await play(storage, (second, *rest))
    assert await storage.get("a") == (sample, ())


async def test_what_a_cancelled_caller_wrote_is_stored(storage: FileTrajectoryStorage) -> None:
    await storage.add(trajectory("first"))
    tasks = [asyncio.create_task(storage.add(trajectory(str(number)))) for number in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await storage.close()
    assert set(await ids(storage)) == {"first", *map(str, range(8))}


async def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = await closed_store(tmp_path, "good", "bad")
    with sqlite3.connect(file) as connection:
        (blob,) = connection.execute("SELECT nodes FROM chunks WHERE episode = 2").fetchone()
        connection.execute("UPDATE chunks SET nodes = ? WHERE episode = 2", (blob[:-9] + bytes(1) + blob[-8:],))
    storage = FileTrajectoryStorage(tmp_path)
    assert await storage.get("good") is not None
    with pytest.raises(StorageError, match=r"episode bad.*damaged.*backup"):
        await storage.get("bad")
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM chunks WHERE episode = 2")
    with pytest.raises(StorageError, match=r"'bad' has 0 of 3 nodes"):
        await storage.get("bad")


async def test_a_damaged_file_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    file = await closed_store(tmp_path, *map(str, range(50)))
    whole = file.read_bytes()
    for damaged in (
        b"not a database at all" * 100,
        whole[:100] + os.urandom(len(whole) - 100),
        whole[: len(whole) // 2],
    ):
        file.write_bytes(damaged)
        storage = FileTrajectoryStorage(tmp_path)
        with pytest.raises(StorageError, match=r"damaged or no database.*restore it from a backup"):
            await ids(storage)
        with pytest.raises(StorageError, match=r"damaged or no database"):
            await storage.add(trajectory("new"))
        await storage.close()
        assert file.read_bytes() == damaged


async def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    for call in (FileTrajectoryStorage(tmp_path).count(), FileTrajectoryStorage(tmp_path).add(trajectory("a"))):
        with pytest.raises(StorageError, match="database of something else"):
            await call


async def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = await closed_store(tmp_path, "a")
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 3")
    for call in (FileTrajectoryStorage(tmp_path).count(), FileTrajectoryStorage(tmp_path).add(trajectory("b"))):
        with pytest.raises(StorageError, match=r"schema version 3.*upgrade openhands_rl_plugin"):
            await call


async def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot be used.*\[rl.storage\]"):
        await FileTrajectoryStorage(tmp_path / "file" / "store").add(trajectory("a"))
    (tmp_path / "store" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(StorageError, match=r"permissions.*\[rl.storage\]"):
        await FileTrajectoryStorage(tmp_path / "store").add(trajectory("a"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
async def test_a_folder_that_may_not_be_written_is_reported(tmp_path: Path) -> None:
    await closed_store(tmp_path / "store", "a")
    (tmp_path / "store" / FILE_NAME).chmod(0o400)
    (tmp_path / "store").chmod(0o500)
    with pytest.raises(StorageError, match=r"may not be written.*change their permissions"):
        await FileTrajectoryStorage(tmp_path / "store").add(trajectory("b"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser mounts")
async def test_a_store_on_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    store, view = tmp_path / "store", tmp_path / "view"
    await closed_store(store, "a")
    with closing(sqlite3.connect(store / FILE_NAME)) as connection:
        connection.executescript("DROP TABLE labels; DROP TABLE names")  # as an earlier release left it
    view.mkdir()
    for words in (["--bind", str(store), str(view)], ["-o", "remount,ro,bind", str(view)]):
        if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
            pytest.skip("nothing may be mounted here")
    try:
        async with FileTrajectoryStorage(view) as storage:
            assert await ids(storage) == ["a"] == await ids(storage)
            with pytest.raises(StorageError, match="may not be written"):
                await storage.add(trajectory("b"))
        async with FileTrajectoryStorage(store) as writer, FileTrajectoryStorage(view) as storage:
            await writer.add(trajectory("b"))
            assert await ids(storage) == ["a", "b"]
            copy = (store / f"{FILE_NAME}-wal").read_bytes()
        (store / f"{FILE_NAME}-wal").write_bytes(copy)
        async with FileTrajectoryStorage(view) as storage:
            with pytest.raises(StorageError, match=f"{FILE_NAME}-wal has records .* copy"):
                await ids(storage)
    finally:
        subprocess.run(["umount", str(view)], check=True)


async def test_a_failed_write_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    storage = FileTrajectoryStorage(tmp_path / "store")
    with pytest.raises(StorageError):
        await storage.add(trajectory("a"))
    (tmp_path / "store").unlink()
    await storage.add(trajectory("b"))
    assert await ids(storage) == ["b"]


async def test_two_that_make_a_store_at_once_make_it_once(tmp_path: Path) -> None:
    first, second = FileTrajectoryStorage(tmp_path), FileTrajectoryStorage(tmp_path)
    await asyncio.gather(first.add(trajectory("a")), second.add(trajectory("b")), first.count(), second.count())
    assert sorted(await ids(first)) == ["a", "b"]
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}


async def test_other_files_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "segment.jsonl").write_text("{}\n")
    storage = FileTrajectoryStorage(tmp_path)
    assert await ids(storage) == []
    await storage.add(trajectory("a"))
    assert await ids(storage) == ["a"]


async def test_the_second_schema_version_can_be_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "version-2", tmp_path / "store")
    storage = FileTrajectoryStorage(tmp_path / "store")
    expected = []
    for line in (GOLDEN / "version-2" / "expected.jsonl").read_text(encoding="utf-8").splitlines():
        found, scores = json.loads(line)
        expected.append((Trajectory.model_validate(found), tuple(map(Score.model_validate, scores))))
    assert [one.stop for one, _ in expected].count(StopReason.UNFINISHED) == 1
    assert [pair async for pair in storage.find(TrajectoryFilter(finished=None))] == expected
    # It can be written, too: the unfinished episode goes on.
    await play(storage, steps_of(sample_episode("unfinished"))[2:])
    assert await storage.get("unfinished") == (sample_episode("unfinished"), ())
