"""What the studio's server takes: pages of a list of 100,000 episodes, facets, a prefix, an episode, memory.

    python -m evaluation.performance.studio.server [--episodes 100000] [--store DIR]

A store is made in ``--store``, unless there is one, and stays there. Times are medians over HTTP on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from evaluation.performance.studio.episodes import Words, coding_episode, long_episode
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

_AT_ONCE = 512
_ROUNDS = 15
_PAGE_BOUND, _MEMORY_BOUND = 150.0, 200.0


async def make_store(folder: Path, episodes: int) -> None:
    """Small episodes of 40 runs, 2,000 tasks and 12 versions; one in 20 failed; and one long one."""
    storage, drawn, words = FileTrajectoryStorage(folder, durable=False), random.Random(0), Words()
    shapes = [coding_episode(words, "", seed=at, turns=1 + at % 3, reward=at / 8) for at in range(9)]
    gone = Failure(kind=FailureKind.INFRASTRUCTURE, message="the server went away", boundary="environment.step")
    await storage.add(long_episode(words, "long"))
    for first in range(0, episodes, _AT_ONCE):
        made = []
        for at in range(first, min(first + _AT_ONCE, episodes)):
            shape, failed = drawn.choice(shapes), drawn.random() < 0.05
            version, task = 1 + at * 12 // episodes, f"task-{drawn.randrange(2000)}"
            times = shape.times.model_copy(update={"finished": 1.7e9 + at, "started": 1.7e9 + at - drawn.random() * 90})
            changes = {
                "id": f"{drawn.getrandbits(128):032x}",
                "run_id": f"run-{at * 40 // episodes}",
                "group_id": f"group-{at // 8}",
                "task": shape.task.model_copy(update={"id": task}),
                "policy": shape.policy.model_copy(update={"version": version}),
                "failure": gone if failed else None,
                "stop": StopReason.ERROR if failed else shape.stop,
                "times": times,
            }
            made.append(storage.add(shape.model_copy(update=changes)))
        await asyncio.gather(*made)
    await storage.close()


def measure(store: Path) -> bool:
    """Print the figures; whether all bounds hold."""
    environment = os.environ | {"OPENHANDS_RL_API_KEY": "benchmark"}
    command = [sys.executable, "-m", "openhands_rl_plugin", "studio", str(store), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None, "it is a pipe"
        url = server.stdout.readline().split("at ")[1].split("/?")[0]
        headers = {"Authorization": "Bearer benchmark"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
            client = Timed(http, server.pid)
            good = _lists(client) & _others(client)
        resident = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        print(f"memory of the server: {resident:.0f} MB (bound {_MEMORY_BOUND:.0f})")
        return good and resident < _MEMORY_BOUND
    finally:
        server.terminate()
        server.wait()


class Timed:
    """Asks again and again: medians in milliseconds, of the wall clock and of the server's processor time."""

    def __init__(self, http: httpx.Client, server: int) -> None:
        self.http = http
        self._threads = Path(f"/proc/{server}/task")

    def median(self, address: str) -> tuple[float, float]:
        """Of 15 rounds; nothing is taken from a cache of the client's."""
        wall: list[float] = []
        used: list[float] = []
        for _ in range(_ROUNDS):
            started, before = time.perf_counter(), self._used()
            self.http.get(address).raise_for_status()
            wall.append(1000 * (time.perf_counter() - started))
            used.append(self._used() - before)
        return statistics.median(wall), statistics.median(used)

    def told(self, address: str) -> str:
        """Both as a text."""
        wall, used = self.median(address)
        return f"{wall:.0f} ms, {used:.0f} ms of processor time"

    def _used(self) -> float:
        nanoseconds = 0
        for thread in self._threads.iterdir():
            with suppress(OSError):
                nanoseconds += int((thread / "schedstat").read_text().split()[0])
        return nanoseconds / 1e6


def _lists(client: Timed) -> bool:
    total = client.http.get("/api/episodes?limit=1").json()["total"]
    print(f"{total:,} episodes, load {os.getloadavg()[0]:.1f}")
    cases = {
        "first page": "limit=100",
        "page in the middle": f"limit=100&offset={total // 2}",
        "last page": f"limit=100&offset={max(0, total - 100)}",
        "by reward": "limit=100&sort=-reward",
        "by reward, in the middle": f"limit=100&sort=-reward&offset={total // 2}",
        "by tokens, last": f"limit=100&sort=-tokens&offset={max(0, total - 100)}",
        "query": "limit=100&q=run:run-7|run-8 reward:<0.5 -failed:*",
        "query for a tenth, last page": f"limit=100&q=adapter:shop@3&offset={max(0, total // 12 - 100)}",
    }
    good = True
    for name, query in cases.items():
        wall, used = client.median(f"/api/episodes?{query}")
        good &= wall < _PAGE_BOUND
        print(f"{name}: {wall:.0f} ms (bound {_PAGE_BOUND:.0f}), {used:.0f} ms of processor time")
    after = client.http.get("/api/episodes?limit=100&sort=-reward").json()["next"]
    print(f"next page by reward: {client.told(f'/api/episodes?limit=100&sort=-reward&after={after}')}")
    return good


def _others(client: Timed) -> bool:
    some = client.http.get("/api/episodes?limit=1&offset=1000").json()["rows"]["id"][0]
    print(f"facets of all, four columns and rewards: {client.told('/api/facets')}")
    print(f"facets of one run: {client.told('/api/facets?q=run:run-7')}")
    for name in ("run", "adapter", "stop", "failed", "task"):
        print(f"facet {name} alone: {client.told(f'/api/facets?by={name}&rewards=0')}")
    print(f"prefix of an id: {client.told(f'/api/episodes?q=id:{some[:10]}*')}")
    print(f"small episode: {client.told(f'/api/episodes/{some}')}")
    header = client.http.get("/api/episodes/long")
    nodes, kilobytes = header.json()["nodes"], len(header.content) / 1024
    sent = int(header.headers["content-length"]) / 1024
    sizes = f"{kilobytes:.0f} KB (bound 80), {sent:.0f} KB sent"
    print(f"long episode of {len(nodes['parent'])} nodes: {client.told('/api/episodes/long')}, {sizes}")
    return kilobytes < 80


def main() -> int:
    """Make the store where there is none, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--store", type=Path, default=Path("/tmp/studio-100k"))
    args = parser.parse_args()
    if not args.store.exists():
        started = time.perf_counter()
        asyncio.run(make_store(args.store, args.episodes))
        print(f"made in {time.perf_counter() - started:.0f} s")
    return 0 if measure(args.store) else 1


if __name__ == "__main__":
    sys.exit(main())
