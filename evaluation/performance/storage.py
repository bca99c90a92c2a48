"""How fast trajectories are stored and read back: ``python -m evaluation.performance.storage``.

Prints a table, and the same figures as one JSON line. The folder decides what is measured: give one on the disk that
will hold the trajectories (a folder in memory would make ``fsync`` free).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from openhands_rl_plugin import (
    EpisodeRequest,
    EpisodeTree,
    FileTrajectoryStorage,
    Message,
    Observation,
    Task,
    Trajectory,
)
from openhands_rl_plugin.types import Completion, PolicyRef, StopReason, StrategySpec, Times, Tokens

VOCABULARY = 49_152


def episode(identity: str, *, turns: int, prompt_tokens: int, sampled_tokens: int, seed: int) -> Trajectory:
    """An episode in which every turn adds ``prompt_tokens`` read and ``sampled_tokens`` sampled ones with logprobs.

    The text has about four characters a token, and the logprobs the 32-bit precision that servers send.
    """
    random_ = random.Random(seed)
    policy = PolicyRef(base_model="smollm2-135m", adapter="policy", version=1)
    tree = EpisodeTree()
    context: tuple[int, ...] = ()
    for turn in range(turns):
        tree.observe(Observation(messages=(Message(role="user", content=_text(random_, prompt_tokens)),)))
        prompt = context + _ids(random_, prompt_tokens)
        sampled = _ids(random_, sampled_tokens)
        logprobs = tuple(round(-random_.expovariate(2.0), 7) for _ in sampled)
        tree.commit(
            tree.propose(
                Completion(
                    message=Message(role="assistant", content=_text(random_, sampled_tokens)),
                    tokens=Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs),
                    finish_reason="stop",
                    policy=policy,
                )
            )
        )
        tree.observe(Observation(reward=1.0, terminated=turn == turns - 1))
        context = prompt + sampled
    return tree.freeze(
        EpisodeRequest(task=Task(id="goal", environment="webshop"), run_id="benchmark", group_id="group"),
        trajectory_id=identity,
        strategy=StrategySpec(name="StandardReAct"),
        policy=policy,
        stop=StopReason.TERMINATED,
        times=Times(started=0.0, finished=1.0),
    )


async def measure(folder: Path, *, count: int, concurrency: int, turns: int) -> dict[str, float]:
    """Store ``count`` episodes from ``concurrency`` tasks, then read all of them back in a fresh storage."""
    episodes = [
        episode(str(number), turns=turns, prompt_tokens=1000, sampled_tokens=300, seed=number)
        for number in range(count)
    ]
    waits: list[float] = []
    waiting = iter(episodes)
    storage = FileTrajectoryStorage(folder)

    async def work() -> None:
        for one in waiting:
            started = time.perf_counter()
            await storage.add(one)
            waits.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    writing = time.perf_counter() - started
    await storage.close()
    size = sum(path.stat().st_size for path in folder.rglob("*.jsonl"))

    started = time.perf_counter()
    read = [found.id async for found, _ in FileTrajectoryStorage(folder).find()]
    reading = time.perf_counter() - started
    if sorted(read) != sorted(one.id for one in episodes):
        raise SystemExit("error: what was read is not what was stored")
    return {
        "durable appends a second": count / writing,
        "median wait for one append, ms": 1000 * sorted(waits)[count // 2],
        "bytes a turn of 1,300 new tokens": size / (count * turns),
        "episodes read a second": count / reading,
        "megabytes read a second": size / reading / 1e6,
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="a scratch folder is made in here (default: .)")
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5, help="turns an episode (default: 5)")
    parser.add_argument("--concurrency", type=int, default=16, help="appends that wait at a time (default: 16)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="storage-benchmark-") as scratch:
        figures = asyncio.run(
            measure(
                Path(scratch) / "store",
                count=options.episodes,
                concurrency=options.concurrency,
                turns=options.turns,
            )
        )
    title = f"{options.episodes} episodes of {options.turns} turns, {options.concurrency} appends at a time"
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.1f}")
    Console().print(table)
    print(json.dumps(figures))


def _ids(random_: random.Random, count: int) -> tuple[int, ...]:
    return tuple(random_.randrange(VOCABULARY) for _ in range(count))


def _text(random_: random.Random, tokens: int) -> str:
    return " ".join(random_.choice(("red", "mug", "buy", "sea", "the")) for _ in range(tokens))


if __name__ == "__main__":
    main()
