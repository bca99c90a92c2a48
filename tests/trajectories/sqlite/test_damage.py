"""A store with flipped bits: a damaged record is named and left out, a torn file is one line. Never a traceback."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart, TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.testing import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, FileTrajectoryStorage

ALL = TrajectoryFilter(finished=None)
EPISODES = 40
Stored = dict[str, tuple[Trajectory, tuple[Score, ...]]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sound")


@pytest.fixture(scope="module")
async def truth(sound: Path) -> Stored:
    """Episodes that were stored at once, while they ran, or have not ended; each with a score."""
    async with FileTrajectoryStorage(sound) as storage:
        for number in range(EPISODES):
            episode = sample_episode(f"episode {number}", run="r", reward=0.5)
            if number % 2:
                await storage.add(episode)
            else:
                await storage.begin(EpisodeStart.of(episode))
                for growth in steps_of(episode)[1:-1]:
                    await storage.grow(growth)  # type: ignore[arg-type]
                if number % 6:
                    await storage.end(EpisodeEnd.of(episode))
            await storage.add_scores([sample_score(episode.id, 0.25)])
        return {found[0].id: found async for found in storage.find(ALL)}


@pytest.fixture
def broken(sound: Path, truth: Stored, tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(sound, folder)
    return folder


def flips(source: random.Random, clean: bytes, count: int) -> Iterator[bytes]:
    for _ in range(count):
        data = bytearray(clean)
        at = source.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        yield bytes(data)


@pytest.mark.parametrize("seed", range(3))
async def test_ordinary_reading_of_a_damaged_store_is_right_or_an_error(broken: Path, truth: Stored, seed: int) -> None:
    file = broken / FILE_NAME
    for damaged in flips(random.Random(100 + seed), file.read_bytes(), 30):
        file.write_bytes(damaged)
        try:
            async with FileTrajectoryStorage(broken) as storage:
                await storage.check()
                found = {trajectory.id async for trajectory, _ in storage.find(ALL)}
        except RLError:
            continue
        assert found == truth.keys()


def ruin(folder: Path, identity: str, table: str = "chunks", column: str = "nodes") -> None:
    """Flip a bit in a packed value of one episode."""
    of = {"chunks": "episode = (SELECT row FROM episodes WHERE id = ?)", "scores": "trajectory_id = ?"}[table]
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        row, blob = connection.execute(f"SELECT rowid, {column} FROM {table} WHERE {of}", (identity,)).fetchone()
        data = bytearray(blob)
        data[40] ^= 4
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (bytes(data), row))


def test_commands_name_what_is_damaged_and_read_everything_else(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ruin(broken, "episode 7")
    ruin(broken, "episode 9", "scores", "score")
    rows = tmp_path / "rows.jsonl"
    export = ["export", str(broken), "--format", "trajectories", "--out", str(rows)]
    assert main(export) == 1
    seen = capsys.readouterr().err
    assert "episode 7" in seen and "--skip-damaged" in seen and "Traceback" not in seen
    assert main([*export, "--skip-damaged", "--all"]) == 0
    seen = capsys.readouterr().err
    assert seen.count("left out, as it cannot be read: ") == 2
    assert "episode episode 7 (row 8): a record is damaged" in seen and "score episode 9 (row 10)" in seen
    assert len(rows.read_text().splitlines()) == EPISODES - 1
    for command in (["list", "--by"], ["score", "--reward", "return"]):
        assert main([command[0], str(broken), *command[1:], "--skip-damaged"]) == 0, command
        assert "episode 7" in capsys.readouterr().err


# The magic, the file format, the root of the schema, the application, the version, and the schema's first page.
@pytest.mark.parametrize("at", [3, 18, 44, 63, 68, 100, 103])
def test_a_torn_file_is_one_line_with_the_remedy(
    broken: Path, tmp_path: Path, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = broken / FILE_NAME
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    export = ["export", str(broken), "--format", "trajectories", "--out", str(tmp_path / "rows.jsonl"), "--all"]
    for words in ([], ["--skip-damaged"]):
        readable = main([*export, *words]) == 0
        seen = capsys.readouterr().err
        if readable:
            assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == EPISODES
        else:
            assert seen.count("\n") == 1 and ("restore it from a backup" in seen or f"{file} .recover" in seen), seen


def test_a_damaged_list_of_episodes_is_not_read_in_part(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = broken / FILE_NAME
    with closing(sqlite3.connect(file)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'episodes_id'").fetchone()
    data = bytearray(file.read_bytes())
    data[(root - 1) * 4096 : root * 4096] = bytes(4096)
    file.write_bytes(data)
    for words in ([], ["--skip-damaged"]):
        assert main(["list", str(broken), *words]) == 1
        seen = capsys.readouterr().err
        assert f"sqlite3 {file} .recover" in seen and seen.count("\n") == 1
