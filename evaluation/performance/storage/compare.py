"""How fast trajectories are stored and found again, against other projects' stores and the least possible work.

    python -m evaluation.performance.storage.compare [--repeats 5] [--rllm-python PATH] [--former DIR] [--folder DIR]

- appends: sessions are stored by 16 tasks; each ``grow`` brings one turn of 1,300 new tokens with logprobs and its
  messages, and the mark with the reward of the turn before, and returns when it is on the disk;
- scan: all of that is read back by a storage that was opened anew;
- first page: the first 50 that are found among 100,000 small trajectories, by every filter in three orders. Of these
  queries the slowest counts. "cold" is the first query of a new process (without the time that Python and the imports
  take), "warm" one of an old process.

Two floors take turns with the stores, in one thread and with the same groups. "least" looks for secrets, packs, and
inserts into one table; it reads the nodes back. "bare" inserts bytes that were packed before, and reads them as JSON
without making nodes: what a form of columns could save.

The folder decides what is measured: give one on the disk that will hold the trajectories (a folder in memory would
make the flushing free). On a shared machine, compare the figures for a CPU second.

``--rllm-python`` is a Python with rllm-model-gateway (``uv pip install rllm-model-gateway==0.1.0``); its store takes
turns with this one on a part of the sessions, because each of its records holds the whole prompt. ``--former`` is a
checkout of other code of this project, whose store takes turns as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import batched, chain, pairwise
from pathlib import Path

from backports import zstd
from pydantic_core import from_json

from evaluation.performance.storage.load import Turn
from evaluation.performance.storage.pages import cold_first_page, fill, first_page, queries
from openhands_rl_plugin import FileTrajectoryStorage, Message
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, NodeMark
from openhands_rl_plugin.core.redaction import redact_nodes, secrets_looked_up_once
from openhands_rl_plugin.core.types import Node, PolicyRef, SamplingParams, Tokens
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.trajectories.storages.log import PASSING, pack_nodes, unpack_nodes

TURNS = 30
CONCURRENCY = 16
PEER_SESSIONS = 8
OURS, FORMER, RLLM = "this", "former", "rllm"
FLOORS = ("least", "bare")

_POLICY = PolicyRef(base_model="smollm2-135m", adapter="policy", version=1)

Step = EpisodeStart | EpisodeGrowth | EpisodeEnd


@dataclass(frozen=True)
class Sample:
    """One measurement of one store: records a second, and bytes a record."""

    appends: float
    bytes: float
    scan: float | None
    appends_of_cpu: float | None = None
    scan_of_cpu: float | None = None


def steps_of(identity: str, turns: Sequence[Turn]) -> list[Step]:
    """A session as its recorder stores it."""
    sample = sample_episode(identity, run="benchmark", group=identity, policy=_POLICY)
    steps: list[Step] = [EpisodeStart.of(sample)]
    for at, turn in enumerate(turns):
        nodes = (
            Node(parent=2 * at - 1 if at else None, message=Message(role="user", content=turn.read)),
            _answer(identity, at, turn),
        )
        marks = (NodeMark(index=2 * at - 1, reward=0.0),) if at else ()
        steps.append(EpisodeGrowth(trajectory_id=identity, first=2 * at, nodes=nodes, head=2 * at + 1, marks=marks))
    return [*steps, EpisodeEnd.of(sample).model_copy(update={"head": 2 * len(turns) - 1})]


def _answer(identity: str, at: int, turn: Turn) -> Node:
    return Node(
        parent=2 * at,
        message=Message(role="assistant", content=turn.answer),
        sampled=True,
        tokens=Tokens.of(turn.read_ids, turn.answer_ids, turn.logprobs, extends=at > 0),
        policy=_POLICY,
        sampling=SamplingParams(temperature=1.0, max_tokens=512),
        finish_reason="stop",
        metadata={"response_id": f"chatcmpl-{identity}-{at}", "attempts": 1},
    )


def now() -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def _sample(folder: Path, calls: int, nodes: int, *times: tuple[float, float]) -> Sample:
    """``times``: before and after the writing, before and after the reading."""
    if nodes != 2 * calls:
        raise SystemExit("error: what was read is not what was stored")
    size = sum(path.stat().st_size for path in folder.iterdir())
    (write, write_cpu), _, (read, read_cpu) = ((b - a, d - c) for (a, c), (b, d) in pairwise(times))
    return Sample(calls / write, size / calls, calls / read, calls / write_cpu, calls / read_cpu)


async def store(storage: FileTrajectoryStorage, steps: Sequence[Step]) -> None:
    """Store an episode while it runs."""
    for step in steps:
        if isinstance(step, EpisodeStart):
            await storage.begin(step)
        elif isinstance(step, EpisodeGrowth):
            await storage.grow(step)
        else:
            await storage.end(step)


async def store_and_scan(folder: Path, sessions: Sequence[Sequence[Turn]]) -> Sample:
    """Store all sessions by ``CONCURRENCY`` tasks in a new store, then read it."""
    waiting = iter([steps_of(str(number), turns) for number, turns in enumerate(sessions)])
    storage = FileTrajectoryStorage(folder)

    async def work() -> None:
        for steps in waiting:
            await store(storage, steps)

    began = now()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    written = now()
    await storage.close()
    opened = now()
    async with FileTrajectoryStorage(folder) as reader:
        nodes = sum([len(trajectory.nodes) async for trajectory, _ in reader.find()])
    return _sample(folder, sum(map(len, sessions)), nodes, began, written, opened, now())


async def least(folder: Path, sessions: Sequence[Sequence[Turn]], *, packed: bool = False) -> Sample:
    """The same bytes in the same groups by one table; with ``packed`` they are packed before the time is taken."""
    steps = [steps_of(f"{at}", turns) for at, turns in enumerate(sessions)]
    episodes = [[step.nodes for step in each if isinstance(step, EpisodeGrowth)] for each in steps]
    growths = [[pack_nodes(nodes, PASSING) for nodes in each] for each in episodes if packed]
    wholes = [pack_nodes([*chain(*each)]) for each in episodes if packed]
    folder.mkdir()
    with closing(sqlite3.connect(folder / "least.sqlite", isolation_level=None)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA fullfsync = ON")
        connection.execute("CREATE TABLE chunks (key INTEGER PRIMARY KEY, nodes BLOB)")
        began = now()
        for group in batched(range(len(episodes)), CONCURRENCY):
            for turn in range(TURNS):
                connection.execute("BEGIN IMMEDIATE")
                with secrets_looked_up_once():
                    for at in group:
                        nodes = episodes[at][turn]
                        grown = growths[at][turn] if packed else pack_nodes(redact_nodes(nodes)[0], PASSING)
                        connection.execute("INSERT INTO chunks VALUES (?, ?)", (at * TURNS + turn, grown))
                for at in group if turn == TURNS - 1 else ():
                    whole = wholes[at] if packed else pack_nodes([*chain(*episodes[at])])
                    connection.execute("DELETE FROM chunks WHERE key BETWEEN ? AND ?", (at * TURNS, at * TURNS + turn))
                    connection.execute("INSERT INTO chunks VALUES (?, ?)", (at * TURNS, whole))
                connection.execute("COMMIT")
        written = now()
        read = _plain_json if packed else unpack_nodes
        nodes = sum(len(read(pack)) for (pack,) in connection.execute("SELECT nodes FROM chunks"))
        read_at = now()
    return _sample(folder, sum(map(len, sessions)), nodes, began, written, written, read_at)


async def bare(folder: Path, sessions: Sequence[Sequence[Turn]]) -> Sample:
    """As ``least``, of what was packed before."""
    return await least(folder, sessions, packed=True)


def _plain_json(pack: bytes) -> list[object]:
    data = zstd.decompress(memoryview(pack)[1:])
    count, size = struct.unpack_from("<II", data)
    start = 10 + 16 * count
    return from_json(data[start : start + size])


_ONCE = """
import asyncio, dataclasses, json, pathlib, sys
from evaluation.performance.storage import compare, load
sessions = [load.session(seed, compare.TURNS) for seed in range(int(sys.argv[2]))]
folder, run = pathlib.Path(sys.argv[1]), getattr(compare, sys.argv[3])
asyncio.run(run(folder / "first", sessions[: compare.CONCURRENCY]))
print(json.dumps(dataclasses.asdict(asyncio.run(run(folder / "store", sessions)))))
"""


def measured(name: str, folder: Path, options: argparse.Namespace) -> Sample:
    """One run of one store, or of a floor, in a process of its own."""
    environment = dict(os.environ)
    if name == RLLM:
        script = Path(__file__).with_name("peer.py")
        command = [options.rllm_python, str(script), str(folder), *map(str, (PEER_SESSIONS, TURNS, CONCURRENCY))]
    else:
        environment["PYTHONPATH"] = str(options.former if name == FORMER else Path(__file__).parents[3])
        run = name if name in FLOORS else store_and_scan.__name__
        command = [sys.executable, "-c", _ONCE, str(folder), str(options.sessions), run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=folder)
    if done.returncode:
        raise SystemExit(f"error: {name} failed: {done.stderr.strip().splitlines()[-1:]}")
    return Sample(**json.loads(done.stdout.splitlines()[-1]))


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, list[Sample]]:
    """All stores and floors in changing order, ``--repeats`` times."""
    names = [OURS, *FLOORS, *([FORMER] if options.former else []), *([RLLM] if options.rllm_python else [])]
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for repeat in range(options.repeats):
        for name in random.Random(repeat).sample(names, len(names)):
            folder = scratch / f"{name}-{repeat}"
            folder.mkdir(mode=0o700)
            samples[name].append(measured(name, folder, options))
    return samples


# Field of a sample -> what it is, and what this store has to reach.
_FIELDS = {
    "appends": ("durable appends a second", "at least 3,000"),
    "bytes": ("bytes a turn of 1,300 new tokens", "at most 4,500"),
    "scan": ("turns read a second", "at least 15,000"),
    "appends_of_cpu": ("appends a CPU second", ""),
    "scan_of_cpu": ("turns read a CPU second", ""),
}


def report(samples: dict[str, list[Sample]]) -> None:
    """Print the medians of every store and floor, and their range."""
    for field, (what, bound) in _FIELDS.items():
        print(f"{what}{bound and f' ({bound})'}:")
        for name, runs in samples.items():
            if values := [value for each in runs if (value := getattr(each, field)) is not None]:
                print(f"  {name}: {statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})")


def report_pages(folder: Path, count: int, repeats: int) -> None:
    """Print the medians of all queries of a store of ``count`` trajectories, the slowest first."""
    asyncio.run(fill(folder, count))
    for name, ask in (("cold", cold_first_page), ("warm", first_page)):
        asked = queries(count).items()
        medians = {query: statistics.median(ask(folder, where) for _ in range(repeats)) for query, where in asked}
        print(f"seconds to the first page of {count:,}, {name} (at most 0.1):")
        for query in sorted(medians, key=lambda each: -medians[each]):
            print(f"  {query}: {medians[query]:.3f}")


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="a scratch folder is made in here (default: .)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=64, help=f"sessions of {TURNS} turns a round (0: none)")
    parser.add_argument("--trajectories", type=int, default=100_000, help="among which to find (0: none)")
    parser.add_argument("--rllm-python", help="a Python that has rllm-model-gateway")
    parser.add_argument("--former", type=Path, help="a checkout of other code of this project")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="storage-benchmark-") as scratch:
        if options.sessions:
            report(measure(Path(scratch), options))
        if options.trajectories:
            report_pages(Path(scratch) / "many", options.trajectories, options.repeats)
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()}, load before: {before:.2f}")


if __name__ == "__main__":
    main()
