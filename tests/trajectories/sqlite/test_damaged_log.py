"""A damaged write-ahead log, and an index whose pages point wildly: what is missing is named, and reading ends."""

from __future__ import annotations

import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.sqlite.database import FILE_NAME
from openhands_rl_plugin.trajectories.sqlite.pages import USUAL_PAGE_BYTES, SqlitePages
from openhands_rl_plugin.trajectories.sqlite.salvage import SalvageReader
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SIZE = USUAL_PAGE_BYTES
FRAME = 24 + SIZE
EPISODES = 5


@pytest.fixture
async def running(tmp_path: Path) -> Path:
    """A store as a stopped process leaves it: the newest episodes are in the log only."""
    async with FileTrajectoryStorage(tmp_path / "open") as storage:
        for number in range(EPISODES):
            await storage.add(sample_episode(f"episode {number}", run="r", reward=0.5))
        shutil.copytree(tmp_path / "open", tmp_path / "copy")
    return tmp_path / "copy"


def read(folder: Path) -> tuple[set[str], list[str]]:
    reader = SalvageReader(folder)
    found = {trajectory.id for trajectory, _ in reader.episodes()}
    reader.close()
    return found, [record.in_words() for record in reader.lost if record.what == "log"]


def flip(folder: Path, at: int) -> None:
    log = folder / f"{FILE_NAME}-wal"
    data = bytearray(log.read_bytes())
    data[at] ^= 1
    log.write_bytes(data)


def frames(folder: Path) -> int:
    return ((folder / f"{FILE_NAME}-wal").stat().st_size - 32) // FRAME


def test_a_sound_log_is_no_damage(running: Path) -> None:
    found, log = read(running)
    assert len(found) == EPISODES and not log


@pytest.mark.parametrize("at", [0, 3, 16, 23, 24, 31])
def test_a_bit_of_the_logs_header_costs_no_episode_and_is_told(running: Path, at: int) -> None:
    flip(running, at)
    found, log = read(running)
    assert len(found) == EPISODES and len(log) == 1 and "SQLite ignores" in log[0]


def test_a_bit_of_a_frames_salt_costs_no_episode_and_is_told(running: Path) -> None:
    flip(running, 32 + FRAME * (frames(running) // 2) + 8)
    found, log = read(running)
    assert len(found) == EPISODES and len(log) == 1 and "SQLite ignores" in log[0]


@pytest.mark.parametrize("offset", [0, 16, 24 + 1000])
def test_frames_behind_a_damaged_one_are_not_lost_in_silence(running: Path, offset: int) -> None:
    at = frames(running) // 2
    flip(running, 32 + FRAME * at + offset)
    found, log = read(running)
    assert len(found) < EPISODES
    assert len(log) == 1 and f"{frames(running) - at} pages of the write-ahead log cannot be trusted" in log[0]


def test_a_damaged_frame_does_not_replace_the_page_of_the_file(tmp_path: Path) -> None:
    file = _logged(tmp_path)
    flip(tmp_path, 32 + 24 + 100)
    pages = SqlitePages(file)
    kept = pages.page(2)
    pages.close()
    assert pages.log_damage is not None and kept == file.read_bytes()[SIZE : 2 * SIZE]


def test_what_an_older_log_left_behind_is_no_damage(tmp_path: Path) -> None:
    file = _logged(tmp_path)
    pages = SqlitePages(file)
    values = [record.values for record in pages.records() if len(record.values) == 1]
    pages.close()
    assert frames(tmp_path) > 20 and pages.log_damage is None and ("newest",) in values


def _logged(folder: Path) -> Path:
    """A store whose log was begun anew over a longer one."""
    (folder / "live").mkdir()
    live = sqlite3.connect(folder / "live" / FILE_NAME, isolation_level=None)
    live.execute(f"PRAGMA page_size = {SIZE}")
    live.execute("PRAGMA journal_mode = WAL")
    live.execute("CREATE TABLE t (x TEXT)")
    for number in range(30):
        live.execute("INSERT INTO t VALUES (?)", (str(number),))
    live.execute("PRAGMA wal_checkpoint(RESTART)")
    live.execute("INSERT INTO t VALUES ('newest')")
    for name in (FILE_NAME, f"{FILE_NAME}-wal"):
        shutil.copy(folder / "live" / name, folder / name)
    live.close()
    return folder / FILE_NAME


def _interior(following: int, pointers: int) -> bytes:
    page = bytearray(SIZE)
    page[0] = 2
    page[3:5] = struct.pack(">H", pointers)
    page[8:12] = page[1000:1004] = struct.pack(">I", following)
    for at in range(pointers):
        page[12 + 2 * at : 14 + 2 * at] = struct.pack(">H", 1000)
    return bytes(page)


@pytest.mark.parametrize(("depth", "pointers"), [(12, 8), (1500, 0)])
def test_an_index_of_wild_pointers_ends(tmp_path: Path, depth: int, pointers: int) -> None:
    file = tmp_path / FILE_NAME
    chain = [_interior(number + 1, pointers) for number in range(2, 2 + depth)]
    file.write_bytes(b"".join([bytes(SIZE), *chain, bytes(SIZE)]))
    pages = SqlitePages(file, SIZE)
    cells = []
    for cell in pages.index(2):
        cells.append(cell)
        assert len(cells) < 1000
    pages.close()
    assert None in cells
