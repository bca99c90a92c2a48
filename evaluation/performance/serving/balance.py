"""Several model servers behind one address: three stubs of uneven speed, of which one is killed, against the ideal.

A stub answers one call at a time, so its rate is known. The ideal: every stub that is alive is always busy, to the end.

    python -m evaluation.performance.serving.balance [--calls 300] [--seconds 0.2 0.3 0.6] [--at-once 24] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx

from openhands_rl_plugin.models.balancing.balancer import Balancer, running_balancer

_ROOT = Path(__file__).parents[3]
CALLS_OF_AN_EPISODE = 4


class Played(NamedTuple):
    """``answers``: of each episode the stubs that answered; ``lost``: calls without an answer; times in seconds."""

    answers: list[list[str]]
    lost: int
    seconds: float
    killed_at: float


async def _stub(seconds: float, port: int) -> None:
    one = asyncio.Lock()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                if length := re.search(r"content-length: (\d+)", head):
                    await reader.readexactly(int(length[1]))
                if head.startswith("post "):
                    async with one:
                        await asyncio.sleep(seconds)
                said = json.dumps({"port": own}).encode()
                head_sent = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(said)}\r\n\r\n"
                writer.write(head_sent.encode() + said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port)
    own = server.sockets[0].getsockname()[1]
    print(own, flush=True)
    await server.serve_forever()


@contextmanager
def stub(seconds: float, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A stub in a process of its own, and its base URL."""
    command = [sys.executable, "-m", "evaluation.performance.serving.balance", "--stub", str(seconds), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.kill()


async def played(url: str, victim: subprocess.Popen[str], *, episodes: int, at_once: int) -> Played:
    """Episodes of a few calls each through the balancer at ``url``; the victim is killed when a third is done."""
    gate, answers, lost, killed_at = asyncio.Semaphore(at_once), [list[str]() for _ in range(episodes)], 0, 0.0
    started, done = time.monotonic(), 0

    async def episode(number: int, client: httpx.AsyncClient) -> None:
        nonlocal done, lost, killed_at
        async with gate:
            for _ in range(CALLS_OF_AN_EPISODE):
                answer = await client.post(f"{url}/session/e{number}/v1/chat/completions", json={"messages": []})
                if answer.status_code == 200:
                    answers[number].append(str(answer.json()["port"]))
                else:
                    lost += 1
                done += 1
                if done == episodes * CALLS_OF_AN_EPISODE // 3:
                    victim.kill()
                    killed_at = time.monotonic() - started

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300.0, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(episode(number, client) for number in range(episodes)))
    return Played(answers, lost, time.monotonic() - started, killed_at)


def ideal_seconds(seconds: Sequence[float], victim: int, calls: int, killed_at: float) -> float:
    """How long the calls take where each stub is busy while it is alive."""
    rates = [1 / each for each in seconds]
    after = sum(rate for at, rate in enumerate(rates) if at != victim)
    return killed_at + max(0.0, calls - sum(rates) * killed_at) / after


def measured(seconds: Sequence[float], victim: int, *, calls: int, at_once: int) -> tuple[float, str]:
    """One run: its rate as a part of the ideal one, and what happened."""
    with ExitStack() as opened:
        stubs = [opened.enter_context(stub(each)) for each in seconds]
        url = opened.enter_context(running_balancer(Balancer([each for _, each in stubs])))
        episodes = calls // CALLS_OF_AN_EPISODE
        done = asyncio.run(played(url, stubs[victim][0], episodes=episodes, at_once=at_once))
    calls = episodes * CALLS_OF_AN_EPISODE
    ideal = ideal_seconds(seconds, victim, calls, done.killed_at)
    moved = sum(len(set(each)) > 1 for each in done.answers)
    shares = Counter(port for each in done.answers for port in each)
    return ideal / done.seconds, (
        f"killed after {done.killed_at:.1f} s: {calls} calls in {done.seconds:.1f} s, ideal {ideal:.1f} s, "
        f"{ideal / done.seconds:.1%} of its rate; lost {done.lost}; {moved} of {episodes} episodes moved; "
        f"calls by stub {sorted(shares.values(), reverse=True)}; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=300, help="calls in all")
    parser.add_argument("--seconds", type=float, nargs=3, default=[0.2, 0.3, 0.6], help="seconds of a call, by stub")
    parser.add_argument("--at-once", type=int, default=24, help="episodes at a time")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind")
    parser.add_argument("--stub", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stub:
        asyncio.run(_stub(float(args.stub[0]), int(args.stub[1])))
        return
    for victim, name in ((1, "the middle one"), (0, "the fastest")):
        parts: list[float] = []
        for _ in range(args.repeats):
            part, said = measured(args.seconds, victim, calls=args.calls, at_once=args.at_once)
            parts.append(part)
            print(f"{name} {said}", flush=True)
        print(f"{name} killed, {args.at_once} at once: median of {args.repeats}: {median(parts):.1%}", flush=True)


if __name__ == "__main__":
    main()
