"""What is left after a writer is killed, and after the disk is full. Real processes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from keep_writing import CALLS, episode

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason, Trajectory
from openhands_rl_plugin.testing import steps_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.storages.log import joined

pytestmark = pytest.mark.contract

WRITER = Path(__file__).parents[2] / "helpers" / "keep_writing.py"


def start(folder: Path, prefix: str, concurrency: int = 4) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(WRITER), str(folder), prefix, str(concurrency)]
    # Unbuffered: what readline() had read ahead would be missing from communicate().
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def kill_after_first(process: subprocess.Popen[bytes], delay: float) -> dict[str, int]:
    """Wait for the first acknowledgement and then ``delay`` seconds, kill -9; id -> how many of its calls were done."""
    assert process.stdout is not None
    first = process.stdout.readline()
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, errors.decode()
    # The pipe too may end in half a line; that call was not fully reported.
    lines = [line.split() for line in (first + rest).decode().splitlines(keepends=True) if line.endswith("\n")]
    return {identity: int(count) for identity, count in lines}


def calls_seen(trajectory: Trajectory, scores: int) -> int:
    """How many calls an episode shows, after a check that it is what its writer wrote, up to there."""
    expected = episode(trajectory.id)
    if trajectory.stop is not StopReason.UNFINISHED:
        assert trajectory == expected
        return CALLS - 1 + scores
    grown = (0, 3, 5, 6).index(len(trajectory.nodes))
    *before, growth = steps_of(expected)[: grown + 1]
    assert trajectory.head == getattr(growth, "head", None)
    marks = [mark for step in (*before, growth) for mark in getattr(step, "marks", ())]
    unmarked = [node.model_copy(update={"reward": None}) for node in expected.nodes[: len(trajectory.nodes)]]
    assert [*trajectory.nodes] == joined(unmarked, (), marks)
    return 1 + grown


async def read(folder: Path) -> dict[str, int]:
    """Id -> how many of its calls are stored. Every record is parsed and its checksum verified on the way."""
    storage = FileTrajectoryStorage(folder)
    pairs = [pair async for pair in storage.find(TrajectoryFilter(finished=None))]
    found = {trajectory.id: calls_seen(trajectory, len(scores)) for trajectory, scores in pairs}
    assert len(found) == len(pairs)
    await storage.close()
    return found


def assert_nothing_lost(acknowledged: dict[str, int], stored: dict[str, int]) -> None:
    assert acknowledged.keys() <= stored.keys()
    # Of every writer at most the calls that were on their way are there without having been acknowledged.
    assert all(count <= stored[identity] <= count + 1 for identity, count in acknowledged.items())


async def kill_many_times(folder: Path, times: int, seed: int) -> tuple[dict[str, int], dict[str, int]]:
    """Id -> how many calls were acknowledged, and how many are stored."""
    random_ = random.Random(seed)
    acknowledged: dict[str, int] = {}
    running = start(folder, "0")
    for number in range(times):
        # The next one writes while this one is killed, so that there are always two.
        following = start(folder, str(number + 1))
        acknowledged |= kill_after_first(running, random_.uniform(0.0, 0.1))
        running = following
    acknowledged |= kill_after_first(running, 0.0)
    return acknowledged, await read(folder)


@pytest.mark.parametrize("times", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path, times: int) -> None:
    acknowledged, stored = await kill_many_times(tmp_path, times, seed=1)
    assert len(acknowledged) > times
    assert_nothing_lost(acknowledged, stored)


def program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", text, str(folder)]
    return subprocess.run(command, cwd=WRITER.parent, capture_output=True, text=True, timeout=60, check=True)


FULL_DISK = """
import asyncio, resource, sys
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from stored_samples import trajectory

async def main():
    storage = FileTrajectoryStorage(sys.argv[1])
    await storage.add(trajectory("first"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for number in range(100):
        try:
            await storage.add(trajectory(str(number), new_tokens=1300))
        except StorageError as error:
            print(number, error)
            break
    assert [found.id async for found, _ in storage.find()][-1] == str(number - 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    await storage.add(trajectory("after", new_tokens=1300))

asyncio.run(main())
"""


async def test_a_full_disk_is_reported_with_a_remedy_and_leaves_no_half_record(tmp_path: Path) -> None:
    done = program(FULL_DISK, tmp_path)
    number, _, message = done.stdout.strip().partition(" ")
    assert int(number) > 1
    assert message.count("\n") == 0
    assert "free some space" in message and "[rl.storage]" in message
    storage = FileTrajectoryStorage(tmp_path)
    assert [found.id async for found, _ in storage.find()] == ["first", *map(str, range(int(number))), "after"]


AT_THE_END = """
import asyncio, atexit, os, sys
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from stored_samples import trajectory

storage = FileTrajectoryStorage(sys.argv[1])
asyncio.run(storage.add(trajectory("before")))
if (child := os.fork()) == 0:
    try:
        asyncio.run(storage.add(trajectory("child")))
    except StorageError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
atexit.register(lambda: asyncio.run(storage.add(trajectory("at exit"))))
"""


async def test_an_exit_may_save_the_last_episode_and_a_fork_may_not(tmp_path: Path) -> None:
    done = program(AT_THE_END, tmp_path)
    assert done.stderr == "" and "carried over a fork" in done.stdout
    storage = FileTrajectoryStorage(tmp_path)
    assert [trajectory.id async for trajectory, _ in storage.find()] == ["before", "at exit"]
