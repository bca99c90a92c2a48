"""A program that records an episode into MongoDB and kills itself before one step of the writer.

Usage: die_at.py URL DATABASE ID METHOD COUNT [add]: before the COUNT-th call of METHOD of PyMongo's collections; with
``add`` two steps are recorded, and then the whole episode is added. It prints how many nodes were acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from itertools import count

from pymongo.asynchronous.collection import AsyncCollection

from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.testing import sample_episode, steps_of
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage


async def play(storage: MongoDBTrajectoryStorage, step: EpisodeStart | EpisodeGrowth | EpisodeEnd) -> None:
    if isinstance(step, EpisodeStart):
        await storage.begin(step)
    elif isinstance(step, EpisodeGrowth):
        await storage.grow(step)
    else:
        await storage.end(step)


def die_before(method: str, nth: int) -> None:
    original, calls = getattr(AsyncCollection, method), count(1)

    async def dying(*args: object, **kwargs: object) -> object:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return await original(*args, **kwargs)

    setattr(AsyncCollection, method, dying)


async def main(url: str, database: str, identity: str, adds: bool) -> None:
    sample = sample_episode(identity)
    storage = MongoDBTrajectoryStorage(url, database)
    nodes = 0
    for step in steps_of(sample)[: 2 if adds else None]:
        await play(storage, step)
        nodes += len(step.nodes) if isinstance(step, EpisodeGrowth) else 0
        print(nodes, flush=True)
    if adds:
        await storage.add(sample)
        print(len(sample.nodes), flush=True)


if __name__ == "__main__":
    die_before(sys.argv[4], int(sys.argv[5]))
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], "add" in sys.argv))
