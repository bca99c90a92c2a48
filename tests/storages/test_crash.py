"""What is left after a writer is killed, after two write at once, and after the disk is full. Real processes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openhands_rl_plugin.storages.file import FileTrajectoryStorage

WRITER = Path(__file__).with_name("keep_writing.py")


def start(folder: Path, prefix: str, concurrency: int = 4) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(folder), prefix, str(concurrency)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_after_first(process: subprocess.Popen[str], delay: float) -> set[str]:
    """Wait for the first acknowledgement and then ``delay`` seconds, kill -9, and return all that was acknowledged."""
    assert process.stdout is not None
    first = process.stdout.readline()
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, errors
    # The pipe too may end in half a line; that id was not fully reported.
    return {line.strip() for line in [first, *rest.splitlines(keepends=True)] if line.endswith("\n")}


async def read(folder: Path) -> dict[str, int]:
    """Id -> number of its scores. Every record is parsed and its checksum verified on the way."""
    storage = FileTrajectoryStorage(folder)
    found = [(trajectory, len(scores)) async for trajectory, scores in storage.find()]
    assert len({trajectory.id for trajectory, _ in found}) == len(found)
    assert all(len(trajectory.nodes) == 7 for trajectory, _ in found)
    return {trajectory.id: scores for trajectory, scores in found}


async def kill_many_times(folder: Path, times: int, seed: int) -> None:
    random_ = random.Random(seed)
    acknowledged: set[str] = set()
    running = start(folder, "0")
    for number in range(times):
        # The next one starts while this one writes, so that it meets both locked and abandoned segments.
        following = start(folder, str(number + 1))
        acknowledged |= kill_after_first(running, random_.uniform(0.0, 0.05))
        running = following
    acknowledged |= kill_after_first(running, 0.0)
    stored = await read(folder)
    assert acknowledged <= stored.keys()
    assert all(stored[identity] == 1 for identity in acknowledged)


async def test_nothing_acknowledged_is_lost_when_the_writer_is_killed_20_times(tmp_path: Path) -> None:
    await kill_many_times(tmp_path, 20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_when_the_writer_is_killed_200_times(tmp_path: Path) -> None:
    await kill_many_times(tmp_path, 200, seed=2)


async def test_two_processes_write_at_once_and_readers_see_both(tmp_path: Path) -> None:
    writers = [start(tmp_path, "left"), start(tmp_path, "right")]
    reader = FileTrajectoryStorage(tmp_path)
    assert all(writer.stdout is not None and writer.stdout.readline() for writer in writers)
    seen_live = {trajectory.id async for trajectory, _ in reader.find()}
    assert {"left", "right"} <= {identity.split("-")[0] for identity in seen_live}
    acknowledged = set.union(*(kill_after_first(writer, 0.1) for writer in writers))
    assert acknowledged | seen_live <= (await read(tmp_path)).keys()


FULL_DISK = """
import asyncio, resource, sys
from openhands_rl_plugin.errors import StorageError
from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from stored_samples import trajectory

async def main():
    storage = FileTrajectoryStorage(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for number in range(100):
        try:
            await storage.add(trajectory(str(number), new_tokens=1300))
        except StorageError as error:
            print(number, error)
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    await storage.add(trajectory("after", new_tokens=1300))

asyncio.run(main())
"""


async def test_a_full_disk_is_reported_with_a_remedy_and_leaves_no_half_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=WRITER.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    number, _, message = done.stdout.strip().partition(" ")
    assert int(number) > 1
    assert message.count("\n") == 0
    assert "no space left" in message and "free some space" in message and "[rl.storage]" in message
    storage = FileTrajectoryStorage(tmp_path)
    assert [trajectory.id async for trajectory, _ in storage.find()] == [*map(str, range(int(number))), "after"]
    (segment,) = (tmp_path / "trajectories").iterdir()
    assert segment.read_bytes().count(b"\n") == int(number) + 1


AT_EXIT = """
import asyncio, atexit, sys
from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from stored_samples import trajectory

storage = FileTrajectoryStorage(sys.argv[1])
asyncio.run(storage.add(trajectory("before")))
atexit.register(lambda: asyncio.run(storage.add(trajectory("at exit"))))
"""


async def test_the_last_episode_can_be_saved_while_the_interpreter_exits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, cwd=WRITER.parent, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    storage = FileTrajectoryStorage(tmp_path)
    assert [trajectory.id async for trajectory, _ in storage.find()] == ["before", "at exit"]


FORK = """
import asyncio, os, sys
from openhands_rl_plugin.errors import StorageError
from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from stored_samples import trajectory

storage = FileTrajectoryStorage(sys.argv[1])
asyncio.run(storage.add(trajectory("parent")))
if (child := os.fork()) == 0:
    try:
        asyncio.run(storage.add(trajectory("child")))
    except StorageError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


async def test_a_storage_is_not_carried_over_a_fork(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)]
    done = subprocess.run(command, cwd=WRITER.parent, capture_output=True, text=True, timeout=60, check=True)
    assert "fork" in done.stdout
