"""A program that records episodes until it is killed and prints each call that was acknowledged: an id and a number.

The numbers count the calls of an episode: begin, three times grow, end, and a score as the last one.

Usage: keep_writing.py FOLDER PREFIX [CONCURRENCY]
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys

from stored_samples import play

from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.testing import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

CALLS = 6


def episode(identity: str) -> Trajectory:
    """Always the same for one id, and of another length for each."""
    random_ = random.Random(identity)
    return sample_episode(identity, text="".join(random_.choices("0123456789abcdef", k=random_.randrange(20_000))))


async def main(folder: str, prefix: str, concurrency: int) -> None:
    storage = FileTrajectoryStorage(folder)
    numbers = itertools.count()

    async def work() -> None:
        for number in numbers:
            identity = f"{prefix}-{number}"
            for count, step in enumerate(steps_of(episode(identity)), 1):
                await play(storage, [step])
                print(identity, count, flush=True)
            await storage.add_scores([sample_score(identity, 1.0)])
            print(identity, CALLS, flush=True)

    await asyncio.gather(*(work() for _ in range(concurrency)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4))
