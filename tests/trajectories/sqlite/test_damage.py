"""A store with flipped bits: everything else is readable, and what is lost is named. Never a traceback."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart, TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.testing.samples import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.sqlite.database import FILE_NAME
from openhands_rl_plugin.trajectories.sqlite.repair import repair
from openhands_rl_plugin.trajectories.sqlite.salvage import SalvageReader
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_flipped_bit_costs_what_it_hit_and_that_is_named(broken: Path, truth: Stored, seed: int) -> None:
    file = broken / FILE_NAME
    clean = file.read_bytes()
    for damaged in flips(random.Random(seed), clean, 60):
        file.write_bytes(damaged)
        reader = SalvageReader(broken)
        found = {trajectory.id: (trajectory, scores) for trajectory, scores in reader.episodes()}
        reader.close()
        lost = {record.id for record in reader.lost}
        assert len(reader.lost) <= 2 and lost <= truth.keys() | {None}
        for identity, (trajectory, scores) in truth.items():
            if identity in found and identity not in lost:
                assert found[identity] == (trajectory, scores)
            else:
                assert identity in lost
        assert found.keys() <= truth.keys()


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


@pytest.mark.parametrize("page", ["blob", "leaf", "index", "header"])
async def test_whole_pages_may_be_wiped_out(broken: Path, truth: Stored, page: str, tmp_path: Path) -> None:
    file = broken / FILE_NAME
    data = bytearray(file.read_bytes())
    size = 2048
    kinds = {"leaf": 0x0D, "index": 0x0A}
    numbers = range(len(data) // size)
    at = 0 if page == "header" else next(n for n in reversed(numbers) if data[n * size] == kinds.get(page, 0x0D))
    data[at * size : at * size + (100 if page == "header" else size)] = bytes(100 if page == "header" else size)
    file.write_bytes(data)
    async with FileTrajectoryStorage(tmp_path / "whole") as storage:
        lost = await repair(broken, storage)
        found = {trajectory.id: (trajectory, scores) async for trajectory, scores in storage.find(ALL)}
    named = {record.id for record in lost}
    assert named | found.keys() == truth.keys() and len(found) >= EPISODES - 8
    for identity in found.keys() - named:
        assert found[identity][0].nodes == truth[identity][0].nodes and found[identity][1] == truth[identity][1]
    assert file.read_bytes() == data, "the old store is as it was"


def _ruin(folder: Path, identity: str) -> None:
    """Flip a bit in the packed nodes of one episode."""
    file = folder / FILE_NAME
    reader = SalvageReader(folder)
    row = next(row for row, header in reader._contents.headers.items() if header[1] == identity)
    _, place = sorted(reader._contents.chunks[row])[0]
    blob = reader._blob(place, 3)
    reader.close()
    assert blob is not None
    data = bytearray(file.read_bytes())
    at = data.index(blob[:64], (place.page - 1) * 2048)
    data[at + 40] ^= 4
    file.write_bytes(data)


def test_commands_name_the_option_and_read_everything_else(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ruin(broken, "episode 7")
    rows = tmp_path / "rows.jsonl"
    export = ["export", str(broken), "--format", "trajectories", "--out", str(rows)]
    assert main(export) == 1
    told = capsys.readouterr().err
    assert "episode 7" in told and "--skip-damaged" in told and "doctor --repair" in told and "Traceback" not in told
    assert main([*export, "--skip-damaged", "--all"]) == 0
    told = capsys.readouterr().err
    assert "left out, because 1 stored record(s) cannot be read:" in told and "episode episode 7 (row 8)" in told
    assert len(rows.read_text().splitlines()) == EPISODES - 1
    for command in (["stats"], ["list"], ["score", "--reward", "return"]):
        assert main([command[0], str(broken), *command[1:], "--skip-damaged"]) == 0, command
        assert "episode 7" in capsys.readouterr().err


# The magic, the file format, the root of the schema, the application, the version, and the schema's first page.
@pytest.mark.parametrize("at", [3, 18, 44, 63, 68, 100, 103])
def test_a_damaged_beginning_is_one_line_and_skipped(
    broken: Path, tmp_path: Path, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = broken / FILE_NAME
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    rows = tmp_path / "rows.jsonl"
    export = ["export", str(broken), "--format", "trajectories", "--out", str(rows)]
    readable = main(export) == 0
    told = capsys.readouterr().err
    assert readable or ("--repair" in told and told.count("\n") == 1), told
    assert main([*export, "--skip-damaged", "--all"]) == 0
    assert len(rows.read_text().splitlines()) == EPISODES
    assert readable or "--repair" in capsys.readouterr().err


def test_repair_makes_a_new_store_and_leaves_the_old_one(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ruin(broken, "episode 9")
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    target = tmp_path / "new"
    assert main(["doctor", "--repair", str(broken), "--into", str(target)]) == 1
    told = capsys.readouterr().out
    assert "lost: episode episode 9 (row 10)" in told and f"{EPISODES - 1} episodes are in {target}" in told
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before
    assert main(["list", str(target)]) == 0
    assert main(["doctor", "--repair", str(broken), "--into", str(target)]) != 0
    assert "is not empty" in capsys.readouterr().err
