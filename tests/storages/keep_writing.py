"""A program that stores trajectories until it is killed and prints the id of each one that was acknowledged.

Usage: keep_writing.py FOLDER PREFIX [CONCURRENCY]
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from stored_samples import trajectory

from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from openhands_rl_plugin.types import Score


async def main(folder: str, prefix: str, concurrency: int) -> None:
    storage = FileTrajectoryStorage(folder)
    numbers = itertools.count()

    async def work() -> None:
        for number in numbers:
            identity = f"{prefix}-{number}"
            await storage.add(trajectory(identity, turns=3, new_tokens=400))
            await storage.add_scores([Score(trajectory_id=identity, reward=1.0, reward_version="test-1")])
            print(identity, flush=True)

    await asyncio.gather(*(work() for _ in range(concurrency)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4))
