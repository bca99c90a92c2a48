"""The recording gateway against those of other projects: requests a second, latency, memory, and what a kill loses.

    python -m evaluation.performance.gateway.compare [--peer NAME=PYTHON ...] [--repeats 5] [--kills 20] [--csv FILE]

Sessions have 30 turns with prompts of 6,000 to 35,000 tokens and 300 sampled ones. The model server is a process of its
own that answers at once with token ids and logprobs; "direct" goes to it without a gateway. In every repeat all
gateways are started afresh and take turns in changing order, one session (or 16 at a time) after the other, so that
what else the machine does hits all of them. A ratio is the median over the repeats of this gateway's figure to the
peer's in the same repeat. The processor time, that of the gateway's process, depends least on what else is running.

A peer is the Python of an environment in which it is installed: agentlightning (1.0.2), rllm and rllm-sqlite
(rllm-model-gateway 0.1.0), openenv (0.10.0).
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evaluation.performance.gateway.load import Load, Target, play
from evaluation.performance.gateway.processes import (
    OURS,
    PEERS,
    UNFLUSHED,
    gateway,
    memory,
    model_server,
    processor_seconds,
)
from evaluation.performance.gateway.traffic import TURNS, requests
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter

DIRECT = "direct"
CALLS_FOR_MEMORY = 1260


@dataclass
class Sample:
    """One repeat: calls, the seconds that they took, their latencies in milliseconds, and processor seconds."""

    seconds: float = 0.0
    processor: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def add(self, load: Load, processor: float) -> None:
        """One more turn."""
        self.seconds += load.seconds
        self.processor += processor
        self.latencies += [1000 * each for each in load.latencies]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.latencies) / self.seconds

    @property
    def cost(self) -> float:
        """Processor time of the gateway a request, in milliseconds."""
        return 1000 * self.processor / len(self.latencies)

    def quantile(self, part: float) -> float:
        """The latency that this part of the calls does not exceed."""
        return sorted(self.latencies)[min(len(self.latencies) - 1, int(part * len(self.latencies)))]


@dataclass(frozen=True)
class Row:
    """A gateway at one concurrency. ``memory`` is in MB; the ratios compare ours with it, see the module."""

    gateway: str
    concurrency: int
    rate: float
    p50: float
    p99: float
    processor: float | None
    memory: float | None
    times_rate: float | None
    part_of_p99: float | None


@dataclass(frozen=True)
class Kills:
    """What was lost when the gateway was killed: calls whose answer the client had, and that are not stored."""

    kills: int
    answered: int
    lost: int


class Bench:
    """Runs the gateways. ``pythons`` are those of the peers by name; ``turns`` says how many by concurrency."""

    def __init__(self, pythons: Mapping[str, str], model_port: int, turns: Mapping[int, int]) -> None:
        self._pythons = {OURS: sys.executable, UNFLUSHED: sys.executable, **pythons}
        self._model_port = model_port
        self._turns = turns
        self._bodies = requests()
        self.samples: dict[tuple[str, int], list[Sample]] = {}
        self.memories: dict[str, float] = {}

    async def repeat(self, number: int, *, with_memory: bool) -> None:
        """Measure each gateway once."""
        order = random.Random(number)
        with ExitStack() as stack:
            running: dict[str, tuple[int | None, Target]] = {DIRECT: (None, Target(self._model_port))}
            for name, python in self._pythons.items():
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                running[name] = stack.enter_context(gateway(name, python, self._model_port, folder))
            names = list(running)
            # The first session of a process imports, connects and fills caches.
            for name in names:
                await play(running[name][1], ["warm-up"], self._bodies, 1)
            for concurrency, turns in self._turns.items():
                for name in names:
                    self.samples.setdefault((name, concurrency), []).append(Sample())
                for turn in range(turns):
                    order.shuffle(names)
                    for name in names:
                        sessions = [f"{number}-{concurrency}-{turn}-{each}" for each in range(concurrency)]
                        await self._measure(self.samples[name, concurrency][-1], *running[name], sessions)
            if with_memory:
                await self._weigh({name: found for name, found in running.items() if name != DIRECT})

    async def _measure(self, sample: Sample, pid: int | None, target: Target, sessions: Sequence[str]) -> None:
        before = processor_seconds(pid) if pid is not None else 0.0
        load = await play(target, sessions, self._bodies, len(sessions))
        sample.add(load, processor_seconds(pid) - before if pid is not None else 0.0)

    async def _weigh(self, running: Mapping[str, tuple[int | None, Target]]) -> None:
        done = TURNS * (1 + sum(concurrency * turns for concurrency, turns in self._turns.items()))
        left = max(0, CALLS_FOR_MEMORY - done) // TURNS
        for name, (pid, target) in running.items():
            await play(target, [f"more-{each}" for each in range(left)], self._bodies, 16)
            assert pid is not None
            self.memories[name] = memory(pid)

    def rows(self) -> list[Row]:
        """Medians over the repeats."""
        return [self._row(name, concurrency) for name, concurrency in sorted(self.samples, key=lambda key: key[1])]

    def _row(self, name: str, concurrency: int) -> Row:
        theirs, ours = self.samples[name, concurrency], self.samples[OURS, concurrency]
        pairs = list(zip(ours, theirs, strict=True)) if name in PEERS else []
        return Row(
            gateway=name,
            concurrency=concurrency,
            rate=round(statistics.median(each.rate for each in theirs), 1),
            p50=round(statistics.median(each.quantile(0.5) for each in theirs), 1),
            p99=round(statistics.median(each.quantile(0.99) for each in theirs), 1),
            processor=round(statistics.median(each.cost for each in theirs), 1) if name != DIRECT else None,
            memory=round(self.memories[name], 1) if name in self.memories else None,
            times_rate=_median([own.rate / their.rate for own, their in pairs]),
            part_of_p99=_median([own.quantile(0.99) / their.quantile(0.99) for own, their in pairs]),
        )


async def count_lost(model_port: int, kills: int) -> Kills:
    """Kill the gateway ``kills`` times under load, each time at another moment, and look for what was answered."""
    bodies, answered, lost = requests(), 0, 0
    for number in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            with gateway(OURS, sys.executable, model_port, folder) as (pid, target):
                asyncio.get_running_loop().call_later(random.Random(number).uniform(0.2, 1.5), os.kill, pid, 9)
                load = await play(target, [f"{number}-{each}" for each in range(64)], bodies, 16)
            stored = await _stored_calls(folder)
        answered += sum(load.answered.values())
        lost += sum(max(0, count - stored.get(name, 0)) for name, count in load.answered.items())
    return Kills(kills=kills, answered=answered, lost=lost)


async def _stored_calls(folder: str) -> dict[str, int]:
    """Session -> its sampled messages with all their token ids and logprobs."""
    storage: TrajectoryStorage = registry.build("storages", "file", {"path": folder})
    calls = {}
    async for trajectory, _ in storage.find(TrajectoryFilter(finished=None)):
        whole = [node for node in trajectory.nodes if node.tokens is not None and len(node.tokens.logprobs) == 300]
        calls[trajectory.task.id] = len(whole)
    await storage.close()
    return calls


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Recording gateways, 30-turn sessions with prompts of 6,000 to 35,000 tokens")
    for column in (
        "",
        "at a time",
        "req/s",
        "p50 ms",
        "p99 ms",
        "CPU ms",
        "MB",
        "ours: times req/s",
        "ours: part of p99",
    ):
        table.add_column(column, justify="left" if not column else "right", no_wrap=not column)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    return table


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or not Path(python).exists():
        raise argparse.ArgumentTypeError(f"must be NAME=PYTHON with a NAME of {', '.join(PEERS)}")
    return name, python


def main() -> None:
    """Measure, print a table and one line of JSON, and write the table to ``--csv``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=3, help="sessions of each gateway, one at a time, in a repeat")
    parser.add_argument("--rounds", type=int, default=1, help="times 16 sessions of each gateway in a repeat")
    parser.add_argument("--kills", type=int, default=0, help="also kill the gateway so often and count what is lost")
    parser.add_argument("--csv", type=Path, help="where to write the table")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with model_server() as model_port:
        bench = Bench(dict(options.peer), model_port, {1: options.sessions, 16: options.rounds})
        for number in range(options.repeats):
            asyncio.run(bench.repeat(number, with_memory=number == 0))
        kills = asyncio.run(count_lost(model_port, options.kills)) if options.kills else None
    rows = bench.rows()
    Console().print(_table(rows))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": round(before, 2)}
    print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows], "kills": kills and asdict(kills)}))
    if options.csv is not None:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(column.name for column in fields(Row))
            writer.writerows(asdict(row).values() for row in rows)


if __name__ == "__main__":
    main()
