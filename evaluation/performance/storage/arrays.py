"""What token ids cost as arrays: to record a completion, and to hold a batch for training.

    python -m evaluation.performance.storage.arrays [--repeats 5] [--episodes 1000]

- recording: a session is asked for 30 completions with prompts of 6,000 to 35,000 tokens; the server's answers are
  there already. Processor time of all that happens between the host's request and its answer, the store aside. Own
  work is that without the reading of the answer as JSON, which each client does; the least is to read it by orjson;
- batch: stored episodes of 7,800 tokens are made sequences. The memory that these take, by the bytes of their arrays.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from evaluation.performance.gateway import traffic
from evaluation.performance.storage.compare import steps_of, store
from evaluation.performance.storage.load import session
from openhands_rl_plugin import FileTrajectoryStorage, Task
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import EpisodeRequest, Sample, StrategySpec
from openhands_rl_plugin.models.engines.client import EXTENSIONS
from openhands_rl_plugin.models.engines.openai_wire import parse_object
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.training.algorithms import samples_of

TURNS = 6


class Answers:
    """An ``Upstream`` that has its answers."""

    extensions = EXTENSIONS
    refusal = ""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self._bodies = iter(bodies)

    async def send(self, body: object) -> bytes:
        """The next one."""
        return next(self._bodies)


async def recorded(requests: Sequence[bytes], answers: Sequence[bytes]) -> list[float]:
    """Processor milliseconds of each completion of one session."""
    request = EpisodeRequest(task=Task(id="t", environment="workspace", instruction=""), run_id="r", group_id="g")
    made = Session(
        request,
        RLSettings(max_turns=len(answers) + 1),
        strategy=StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model=traffic.MODEL,
        environment_mode=False,
    )
    made.upstream = Answers(answers)
    spent = []
    for body in map(json.loads, requests):
        started = time.thread_time()
        await made.respond(body)
        spent.append(1000 * (time.thread_time() - started))
    tokens = [node.tokens for node in made.tree.nodes if node.tokens is not None]
    if [each.extends for each in tokens] != [False] + [True] * (len(answers) - 1):
        raise SystemExit("error: the completions were not recorded as one sequence")
    return spent


def milliseconds(read: Callable[[bytes], object], answers: Sequence[bytes]) -> list[float]:
    """Processor milliseconds to read each answer."""
    spent = []
    for answer in answers:
        started = time.thread_time()
        read(answer)
        spent.append(1000 * (time.thread_time() - started))
    return spent


async def batch(folder: Path, count: int) -> list[Sample]:
    """The sequences of ``count`` stored episodes."""
    async with FileTrajectoryStorage(folder, durable=False) as storage:
        for at in range(count):
            await store(storage, steps_of(f"{at}", session(at, TURNS)))
        return [sample async for trajectory, _ in storage.find() for sample in samples_of(trajectory)]


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=1000)
    options = parser.parse_args()
    requests, answers = traffic.requests(), traffic.answers()
    times: dict[str, list[float]] = {"all": [], "own work (at most 0.8)": [], "least: orjson": []}
    for _ in range(options.repeats + 1):
        spent, read = asyncio.run(recorded(requests, answers)), milliseconds(parse_object, answers)
        own = map(float.__sub__, spent, read)
        for name, values in zip(times, (spent, own, milliseconds(orjson.loads, answers)), strict=True):
            times[name].append(statistics.median(values))
    print("CPU ms to record a completion:")
    for name, (_, *values) in times.items():  # the first one warms up
        print(f"  {name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="arrays-benchmark-") as scratch:
        asyncio.run(batch(Path(scratch) / "first", 1))
        tracemalloc.start()
        samples = asyncio.run(batch(Path(scratch) / "all", options.episodes))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    arrays = sum(len(bytes(each)) for sample in samples for each in (sample.input_ids, sample.mask, sample.logprobs))
    tokens = sum(len(sample.input_ids) for sample in samples)
    print(f"memory of {tokens:,} tokens, of their arrays (at most 1.4): {held / arrays:.2f} ({held / 2**20:.0f} MiB)")


if __name__ == "__main__":
    main()
