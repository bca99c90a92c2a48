"""Many small trajectories, and how long it takes to see the first page of some of them.

    python -m evaluation.performance.storage.pages FOLDER FILTER

prints the seconds for one filter, given as JSON, in a store that ``fill`` has filled.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openhands_rl_plugin import FileTrajectoryStorage, Trajectory, TrajectoryFilter
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryOrder
from openhands_rl_plugin.core.types import PolicyRef, StopReason
from openhands_rl_plugin.testing import sample_episode

PAGE = 50

_BATCH = 512


def small(number: int) -> Trajectory:
    """One of many, of two turns."""
    return sample_episode(
        f"{number:08d}",
        run=f"run-{number % 20}",
        group=f"group-{number // 8}",
        task=f"goal-{number // 8}",
        environment=("webshop", "workspace", "grid")[number % 3],
        split="train" if number % 50 else "heldout",
        policy=PolicyRef(base_model="smollm2-135m", adapter="policy", version=number // 5000),
        stop=StopReason.TERMINATED if number % 4 else StopReason.MAX_TURNS,
        reward=random.Random(number).random(),
        finished=2000.0 + number,
    )


def queries(count: int) -> dict[str, TrajectoryFilter]:
    """Pages that somebody wants to see of ``count`` trajectories: each filter, by time and by reward."""
    orders = {"newest": TrajectoryOrder.FINISHED, "best": TrajectoryOrder.REWARD}
    filters: dict[str, dict[str, Any]] = {
        "all": {},
        "outcome": {"stop": StopReason.MAX_TURNS, "reward_at_most": 0.5},
        "task": {"task_id": "goal-7"},
        "run": {"run_id": "run-7"},
        "version": {"adapter": "policy", "policy_version": 0},
        "split": {"split": "heldout"},
        "label": {"label": "look again"},
        "time": {"since": 2000 + count / 2, "until": 3000 + count / 2},
        "far down": {"environment": "grid", "reward_at_least": 0.25, "offset": count // 7},
    }
    return {
        f"{name}, {order} first": TrajectoryFilter(**asked, sort=sort, descending=True, limit=PAGE)
        for name, asked in filters.items()
        for order, sort in orders.items()
    }


async def fill(folder: Path, count: int) -> None:
    """Store many small trajectories, without waiting for the disk."""
    async with FileTrajectoryStorage(folder, durable=False) as storage:
        for first in range(0, count, _BATCH):
            await asyncio.gather(*(storage.add(small(number)) for number in range(first, min(first + _BATCH, count))))
        tagged = [f"{number:08d}" for number in range(0, count, 20)]
        tag = Label(id="", trajectory_id="", kind=LabelKind.TAG, text="look again", at=0.0)
        await storage.add_labels([tag.model_copy(update={"id": each, "trajectory_id": each}) for each in tagged])


def first_page(folder: Path, where: TrajectoryFilter) -> float:
    """Seconds of the first page and the count of all, as ``openhands-rl list`` asks a storage that it opens."""
    return asyncio.run(_first_page(folder, where))


async def _first_page(folder: Path, where: TrajectoryFilter) -> float:
    started = time.perf_counter()
    async with FileTrajectoryStorage(folder) as storage:
        page = [each.id async for each in storage.summaries(where)]
        if not page or await storage.count(where) < len(page):
            raise SystemExit("error: nothing was found")
    return time.perf_counter() - started


def cold_first_page(folder: Path, where: TrajectoryFilter) -> float:
    """The same in a process of its own."""
    command = [sys.executable, "-m", __name__, str(folder), where.model_dump_json()]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


if __name__ == "__main__":
    print(first_page(Path(sys.argv[1]), TrajectoryFilter.model_validate_json(sys.argv[2])))
