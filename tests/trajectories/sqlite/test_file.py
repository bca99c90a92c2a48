"""What is particular to the file storage; the rules of all storages are in ``test_conformance.py``."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from pydantic_core import from_json
from stored_samples import play, trajectory

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, TrajectoryFilter
from openhands_rl_plugin.testing import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, FileTrajectoryStorage


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


async def test_calls_that_wait_together_share_a_commit(tmp_path: Path) -> None:
    for durable, level in ((True, 2), (False, 1)):  # 2 flushes every commit, 1 does not
        storage, statements = FileTrajectoryStorage(tmp_path / str(level), durable=durable), list[str]()
        await storage.add(trajectory("first"))
        connection = storage._writer
        assert connection is not None and connection.execute("PRAGMA synchronous").fetchone() == (level,)
        connection.set_trace_callback(statements.append)
        await asyncio.gather(*(storage.add(trajectory(str(number))) for number in range(64)))
        assert 1 <= statements.count("COMMIT") <= 8
        assert len(await ids(storage)) == 65


async def test_a_call_that_fails_leaves_those_beside_it_alone(storage: FileTrajectoryStorage) -> None:
    await play(storage, steps_of(sample_episode("open"))[:2])
    huge = trajectory("huge").model_copy(update={"usage": trajectory("huge").usage.model_copy(update={"steps": 2**70})})
    results = await asyncio.gather(
        storage.add(trajectory("before")),
        storage.grow(EpisodeGrowth(trajectory_id="open", first=9, nodes=())),
        storage.add(huge),
        storage.add(trajectory("deep").model_copy(update={"evidence": {"deep": from_json("[" * 190 + "]" * 190)}})),
        storage.end(EpisodeEnd.model_validate({**steps_of(sample_episode("x"))[-1].model_dump()})),
        storage.add(trajectory("after")),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), *[StorageError] * 4, type(None)]
    assert "has 3 nodes and cannot grow from node 9" in str(results[1])
    assert await ids(storage) == ["before", "after"]
    assert await storage.add_scores([sample_score("huge", 1.0)]) is None  # nothing of it was stored
    await storage.add(trajectory("huge"))
    assert await ids(storage) == ["before", "after", "huge"]


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        ("application_id = 7", "database of something else"),
        ("user_version = 3", r"later openhands_rl_plugin \(schema version 3\); upgrade"),
    ],
)
async def test_a_file_of_others_is_refused(tmp_path: Path, statement: str, refusal: str) -> None:
    file = await closed_store(tmp_path, "a")
    with sqlite3.connect(file) as connection:
        connection.execute(f"PRAGMA {statement}")
    for call in (FileTrajectoryStorage(tmp_path).count(), FileTrajectoryStorage(tmp_path).add(trajectory("b"))):
        with pytest.raises(StorageError, match=refusal):
            await call


async def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot be used.*\[rl.storage\]"):
        await FileTrajectoryStorage(tmp_path / "file" / "store").add(trajectory("a"))
    (tmp_path / "store" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(StorageError, match=r"permissions.*\[rl.storage\]"):
        await FileTrajectoryStorage(tmp_path / "store").add(trajectory("a"))


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
            with pytest.raises(StorageError, match="readonly database"):
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


async def test_two_that_make_a_store_at_once_make_it_once(tmp_path: Path) -> None:
    first, second = FileTrajectoryStorage(tmp_path), FileTrajectoryStorage(tmp_path)
    await asyncio.gather(first.add(trajectory("a")), second.add(trajectory("b")), first.count(), second.count())
    assert sorted(await ids(first)) == ["a", "b"]
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}
