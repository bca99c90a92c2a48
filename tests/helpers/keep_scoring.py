"""Scores a store with a verifier and prints a line for every part that is kept: keep_scoring.py STORE VERIFIER."""

from __future__ import annotations

import asyncio
import sys
import time

import torch

from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.rollout.scoring import rescore
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def on_progress(done: int, total: int) -> None:
    print(done, flush=True)
    time.sleep(0.3)  # so that whoever kills it does so before the next part


async def score(store: str, verifier: str) -> None:
    torch.set_num_threads(1)
    async with FileTrajectoryStorage(store) as storage:
        await rescore(storage, build("rewards", "verifier", {"adapter": verifier}), on_progress=on_progress)


if __name__ == "__main__":
    asyncio.run(score(sys.argv[1], sys.argv[2]))
