"""How fast trajectories are stored and found again, beside other projects' stores.

    python -m evaluation.performance.storage.compare [--repeats 5] [--rllm-python PATH] [--former DIR] [--folder DIR]

- appends: sessions are stored by 16 tasks; each ``grow`` brings one turn of 1,300 new tokens with logprobs and its
  messages, and the mark with the reward of the turn before, and returns when it is on the disk;
- scan: all of that is read back by a storage that was opened anew;
- first page: the first 50 that are found among 100,000 small trajectories. Of four queries the slowest counts. "cold"
  is the first query of a new process (without the time that Python and the imports take), "warm" one of an old process;
- least: what an append and a reading cost at least by themselves: to look for secrets, JSON, zstd, and SQLite.

The folder decides what is measured: give one on the disk that will hold the trajectories (a folder in memory would
make the flushing free). Where others use the machine, too, the figures for a CPU second tell more.

``--rllm-python`` is a Python with rllm-model-gateway; its store takes turns with this one on a part of the sessions,
because each of its records holds the whole prompt. ``--former`` is a checkout of other code of
this project, whose store takes turns as well.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from backports import zstd

from evaluation.performance.storage.load import Turn, session
from evaluation.performance.storage.pages import cold_first_page, fill, first_page, queries
from openhands_rl_plugin import FileTrajectoryStorage, Message, Task
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, NodeMark
from openhands_rl_plugin.core.redaction import redact_nodes, secrets_looked_up_once
from openhands_rl_plugin.core.types import Node, PolicyRef, SamplingParams, StopReason, StrategySpec, Tokens
from openhands_rl_plugin.trajectories.storages.log import pack_nodes, unpack_nodes

TURNS = 30
CONCURRENCY = 16
PEER_SESSIONS = 8
OURS, FORMER, RLLM = "this", "former", "rllm"

_POLICY = PolicyRef(base_model="smollm2-135m", adapter="policy", version=1)

Step = EpisodeStart | EpisodeGrowth | EpisodeEnd


@dataclass(frozen=True)
class Figure:
    """One line of the result. ``bound`` is what has to be reached, where something has."""

    name: str
    value: float
    bound: float | None = None
    at_most: bool = False


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
    steps: list[Step] = [
        EpisodeStart(
            id=identity,
            run_id="benchmark",
            group_id=identity,
            task=Task(id=identity, environment="workspace", instruction="Make the tests pass."),
            strategy=StrategySpec(name="StandardReAct"),
            policy=_POLICY,
            started=0.0,
        )
    ]
    for at, turn in enumerate(turns):
        nodes = (
            Node(parent=2 * at - 1 if at else None, message=Message(role="user", content=turn.read)),
            _answer(identity, at, turn),
        )
        marks = (NodeMark(index=2 * at - 1, reward=0.0),) if at else ()
        steps.append(EpisodeGrowth(trajectory_id=identity, first=2 * at, nodes=nodes, head=2 * at + 1, marks=marks))
    head = 2 * len(turns) - 1
    end = EpisodeEnd(trajectory_id=identity, head=head, stop=StopReason.TERMINATED, policy=_POLICY, finished=1.0)
    return [*steps, end]


def _answer(identity: str, at: int, turn: Turn) -> Node:
    return Node(
        parent=2 * at,
        message=Message(role="assistant", content=turn.said),
        sampled=True,
        tokens=Tokens.of(turn.read_ids, turn.said_ids, turn.logprobs, extends=at > 0),
        policy=_POLICY,
        sampling=SamplingParams(temperature=1.0, max_tokens=512),
        finish_reason="stop",
        metadata={"response_id": f"chatcmpl-{identity}-{at}", "attempts": 1},
    )


async def store_and_scan(folder: Path, sessions: Sequence[Sequence[Turn]]) -> Sample:
    """Store all sessions by ``CONCURRENCY`` tasks in a new store, then read it."""
    episodes = [steps_of(str(number), turns) for number, turns in enumerate(sessions)]
    waiting = iter(episodes)
    storage = FileTrajectoryStorage(folder)

    async def work() -> None:
        for steps in waiting:
            for step in steps:
                if isinstance(step, EpisodeStart):
                    await storage.begin(step)
                elif isinstance(step, EpisodeGrowth):
                    await storage.grow(step)
                else:
                    await storage.end(step)

    calls = sum(map(len, sessions))
    started, worked = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    writing, write_work = time.perf_counter() - started, time.process_time() - worked
    await storage.close()
    size = sum(path.stat().st_size for path in folder.iterdir())
    reader = FileTrajectoryStorage(folder)
    started, worked = time.perf_counter(), time.process_time()
    nodes = [len(trajectory.nodes) async for trajectory, _ in reader.find()]
    reading, read_work = time.perf_counter() - started, time.process_time() - worked
    await reader.close()
    if sum(nodes) != 2 * calls:
        raise SystemExit("error: what was read is not what was stored")
    return Sample(calls / writing, size / calls, calls / reading, calls / write_work, calls / read_work)


_ONCE = """
import asyncio, dataclasses, json, pathlib, sys
from evaluation.performance.storage import compare, load
sessions = [load.session(seed, compare.TURNS) for seed in range(int(sys.argv[2]))]
folder = pathlib.Path(sys.argv[1])
asyncio.run(compare.store_and_scan(folder / "first", sessions[: compare.CONCURRENCY]))
print(json.dumps(dataclasses.asdict(asyncio.run(compare.store_and_scan(folder / "store", sessions)))))
"""


def measured(name: str, folder: Path, options: argparse.Namespace) -> Sample:
    """One run of one store in a process of its own."""
    environment = dict(os.environ)
    if name == RLLM:
        script = Path(__file__).with_name("peer.py")
        numbers = [str(number) for number in (PEER_SESSIONS, TURNS, CONCURRENCY)]
        command = [options.rllm_python, str(script), str(folder), *numbers]
    else:
        code = options.former if name == FORMER else Path(__file__).parents[3]
        environment["PYTHONPATH"] = str(code)
        command = [sys.executable, "-c", _ONCE, str(folder), str(options.sessions)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=folder)
    if done.returncode:
        raise SystemExit(f"error: {name} failed: {done.stderr.strip().splitlines()[-1:]}")
    return Sample(**json.loads(done.stdout.splitlines()[-1]))


def least(scratch: Path, sessions: Sequence[Sequence[Turn]]) -> list[Figure]:
    """What no store of this format and durability does without, in processor seconds; the best of five."""
    growths = [
        [step.nodes for step in steps_of(f"{at}", turns) if isinstance(step, EpisodeGrowth)]
        for at, turns in enumerate(sessions)
    ]
    each = [nodes for episode in growths for nodes in episode]
    whole = [[node for nodes in episode for node in nodes] for episode in growths]
    packs = [pack_nodes(nodes) for nodes in whole]

    def secrets() -> None:
        with secrets_looked_up_once():
            _ = [redact_nodes(nodes) for nodes in each]

    def inserts() -> None:
        with closing(sqlite3.connect(scratch / "least.sqlite", isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("CREATE TABLE IF NOT EXISTS chunks (nodes BLOB)")
            for first in range(0, len(small), CONCURRENCY):
                connection.execute("BEGIN")
                connection.executemany("INSERT INTO chunks VALUES (?)", small[first : first + CONCURRENCY])
                connection.execute("COMMIT")

    small = [(pack_nodes(nodes),) for nodes in each]
    seconds = {
        "secrets": _least_seconds(secrets),
        "pack": _least_seconds(lambda: [pack_nodes(nodes) for nodes in each]),
        "pack whole": _least_seconds(lambda: [pack_nodes(nodes) for nodes in whole]),
        "SQLite": _least_seconds(inserts),
    }
    reading = _least_seconds(lambda: [unpack_nodes(pack) for pack in packs])
    parts = ", ".join(f"{name} {value / len(each) * 1e6:.0f} us" for name, value in seconds.items())
    smallest = sum(len(zstd.compress(zstd.decompress(pack[1:]), 19)) for pack in packs) / len(each)
    return [
        Figure(f"least: appends a CPU second ({parts})", len(each) / sum(seconds.values())),
        Figure("least: turns read a CPU second", len(each) / reading),
        Figure("least: bytes a turn, zstd at level 19", smallest),
    ]


def _least_seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(5):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, list[Sample]]:
    """All stores in changing order, ``--repeats`` times."""
    samples: dict[str, list[Sample]] = {}
    for repeat in range(options.repeats):
        names = [OURS, *([FORMER] if options.former else []), *([RLLM] if options.rllm_python else [])]
        random.Random(repeat).shuffle(names)
        for name in names:
            folder = scratch / f"{name}-{repeat}"
            folder.mkdir(mode=0o700)
            samples.setdefault(name, []).append(measured(name, folder, options))
    return samples


def first_pages(folder: Path, options: argparse.Namespace) -> list[Figure]:
    """Of the medians of all queries the slowest."""
    figures = []
    for name, ask in (
        ("cold", cold_first_page),
        ("warm", lambda folder, where: asyncio.run(first_page(folder, where))),
    ):
        medians = {
            query: statistics.median(ask(folder, where) for _ in range(options.repeats))
            for query, where in queries(options.trajectories).items()
        }
        slowest = max(medians, key=lambda query: medians[query])
        title = f"seconds to the first page of {options.trajectories:,}, {name} ({slowest})"
        figures.append(Figure(title, medians[slowest], 0.1, at_most=True))
    return figures


# Field of a sample -> what it is, what this store has to reach, and whether less is better.
_FIELDS: dict[str, tuple[str, float | None, bool]] = {
    "appends": ("durable appends a second", 3000.0, False),
    "bytes": ("bytes a turn of 1,300 new tokens", 4500.0, True),
    "scan": ("turns read a second", 15_000.0, False),
    "appends_of_cpu": ("appends a CPU second", None, False),
    "scan_of_cpu": ("turns read a CPU second", None, False),
}


def figures_of(samples: dict[str, list[Sample]]) -> Iterator[Figure]:
    """The medians of every store, as far as they are known."""
    for name, runs in sorted(samples.items()):
        for field, (what, bound, at_most) in _FIELDS.items():
            values = [value for each in runs if (value := getattr(each, field)) is not None]
            if values:
                yield Figure(f"{name}: {what}", statistics.median(values), bound if name == OURS else None, at_most)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="a scratch folder is made in here (default: .)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=64, help=f"sessions of {TURNS} turns a round (default: 64)")
    parser.add_argument("--trajectories", type=int, default=100_000, help="among which to find (default: 100,000)")
    parser.add_argument("--rllm-python", help="a Python that has rllm-model-gateway")
    parser.add_argument("--former", type=Path, help="a checkout of other code of this project")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="storage-benchmark-") as scratch:
        samples = measure(Path(scratch), options)
        floor = least(Path(scratch), [session(seed, TURNS) for seed in range(CONCURRENCY)])
        many = Path(scratch) / "many"
        asyncio.run(fill(many, options.trajectories))
        pages = first_pages(many, options) if options.trajectories else []
    figures = [*figures_of(samples), *pages, *floor]
    for figure in figures:
        bound = "" if figure.bound is None else f" ({'at most' if figure.at_most else 'at least'} {figure.bound:,g})"
        print(f"{figure.name}: {figure.value:,.4g}{bound}")
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()}, load before: {before:.2f}")


if __name__ == "__main__":
    main()
