"""What an open studio costs a loop that runs: rounds with and without it, in turns.

    python -m evaluation.performance.studio.beside [--repeats 7] [--episodes 8] [--turns 8] [--work 0.08]

The loop is a process of its own: each turn of its episodes computes for ``--work`` seconds of the processor, as a model
does (a turn of a real one takes longer), and is stored; the store has 20,000 episodes already. "with": the server runs
and a headless Chromium shows the list. "without": the server is stopped (SIGSTOP) and the browser shows an empty page.
Ratios are medians of pairs, with their quartiles. Processor time of the server and of the browser is told as a share of
one core, and of what the loop itself used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from evaluation.performance.studio.episodes import Words, coding_episode
from evaluation.performance.studio.pages import QUIET, fill
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

_CHROMIUM = "/usr/bin/chromium"


class Round(NamedTuple):
    """Seconds: of the clock, of the loop's processor time, of the server's and of the browser's."""

    wall: float
    loop: float
    server: float
    browser: float


async def play(storage: FileTrajectoryStorage, one: Trajectory, work: float) -> None:
    """An episode turn by turn."""
    await storage.begin(EpisodeStart.of(one))
    cuts = [at for at, node in enumerate(one.nodes) if node.sampled]
    for first, until in zip([0, *cuts[1:]], [*cuts[1:], len(one.nodes)], strict=True):
        ends = time.thread_time() + work
        while time.thread_time() < ends:
            pass
        nodes = one.nodes[first:until]
        await storage.grow(EpisodeGrowth(trajectory_id=one.id, first=first, nodes=nodes, head=until - 1))
    await storage.end(EpisodeEnd.of(one))


async def loop(folder: Path, episodes: int, turns: int, work: float) -> None:
    """A round for every line of the standard input; prints its seconds and processor time."""
    words, at = Words(), 0
    async with FileTrajectoryStorage(folder) as storage:
        for _ in sys.stdin:
            made = [coding_episode(words, f"{at}-{each}", seed=each, turns=turns) for each in range(episodes)]
            at, wall, used = at + 1, time.perf_counter(), time.process_time()
            await asyncio.gather(*(play(storage, each, work) for each in made))
            print(time.perf_counter() - wall, time.process_time() - used, flush=True)


def used_by(process: psutil.Process) -> float:
    """Processor time of a process and of those below it."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def rounds(args: argparse.Namespace, store: Path, page: Any, server: subprocess.Popen[str], link: str) -> None:
    """Play and print."""
    command = [sys.executable, "-m", "evaluation.performance.studio.beside", "--loop", str(store)]
    command += ["--episodes", str(args.episodes), "--turns", str(args.turns), "--work", str(args.work)]
    browser = psutil.Process()  # Chromium is below this process
    found: dict[bool, list[Round]] = {True: [], False: []}
    page.goto(link)
    page.wait_for_selector(".row:not(.head) a")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as player:
        assert player.stdin is not None and player.stdout is not None, "they are pipes"
        apart = [psutil.Process(player.pid), psutil.Process(server.pid)]
        for at in range(args.repeats + 1):
            for shown in (True, False) if at % 2 else (False, True):
                page.goto(f"{link.split('/?')[0]}/" if shown else "about:blank")
                if shown:
                    page.wait_for_selector(".row:not(.head) a")
                else:
                    os.kill(server.pid, signal.SIGSTOP)
                before = [used_by(each) for each in (*apart, browser)]
                player.stdin.write("go\n")
                player.stdin.flush()
                wall, own = map(float, player.stdout.readline().split())
                spent = [used_by(each) - was for each, was in zip((*apart, browser), before, strict=True)]
                os.kill(server.pid, signal.SIGCONT)
                if at:  # the first pair warms up
                    found[shown].append(Round(wall, own, spent[1], spent[2] - spent[0] - spent[1]))
        player.stdin.close()
    pairs = list(zip(found[True], found[False], strict=True))
    for name in ("wall", "loop"):
        ratios = [getattr(with_it, name) / getattr(without, name) for with_it, without in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        what = "seconds of a round" if name == "wall" else "the loop's own processor time"
        print(f"{what}: with / without {middle:.4f} ({low:.4f} to {high:.4f}), {len(pairs)} pairs")
    for name in ("server", "browser"):
        spent = sum(getattr(each, name) for each in found[True])
        core, share = (spent / sum(getattr(each, of) for each in found[True]) for of in ("wall", "loop"))
        print(f"processor time of the {name}: {core:.4f} of a core (server: bound 0.01), {share:.4f} of the loop's")
    print(
        f"a round: {statistics.median(each.wall for each in found[False]):.2f} s without, load {os.getloadavg()[0]:.0f}"
    )


def main() -> None:
    """Fill a store, start a studio and a browser, and measure."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, default in (("repeats", 7), ("episodes", 8), ("turns", 8), ("stored", 20_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", type=float, default=0.08)
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        asyncio.run(loop(args.loop, args.episodes, args.turns, args.work))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        fill(store, [sample_episode(f"small-{at:06}", finished=1e9 + at) for at in range(args.stored)])
        command = [sys.executable, "-m", "openhands_rl_plugin", "studio", str(store), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as player:
            assert server.stdout is not None, "it is a pipe"
            link = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            alone = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = player.chromium.launch(executable_path=_CHROMIUM, args=[*QUIET, *alone])
            try:
                rounds(args, store, browser.new_page(), server, link)
            finally:
                browser.close()
                server.terminate()


if __name__ == "__main__":
    main()
