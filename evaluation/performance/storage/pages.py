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

from openhands_rl_plugin import FileTrajectoryStorage, Message, Task, Trajectory, TrajectoryFilter
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryOrder
from openhands_rl_plugin.core.types import Node, PolicyRef, StopReason, StrategySpec, Times, Tokens, Usage

PAGE = 50

_BATCH = 512


def small(number: int) -> Trajectory:
    """One of many: an answer to one question."""
    random_ = random.Random(number)
    ids = tuple(random_.randrange(49_152) for _ in range(12))
    tokens = Tokens.of(ids[:8], ids[8:], (-0.5,) * 4)
    split = "train" if number % 50 else "heldout"
    return Trajectory(
        id=f"{number:08d}",
        run_id=f"run-{number % 20}",
        group_id=f"group-{number // 8}",
        task=Task(id=f"goal-{number // 8}", environment=("webshop", "workspace", "grid")[number % 3], split=split),
        strategy=StrategySpec(name="StandardReAct"),
        policy=PolicyRef(base_model="smollm2-135m", adapter="policy", version=number // 5000),
        nodes=(
            Node(parent=None, message=Message(role="user", content="Find a red mug.")),
            Node(
                parent=0,
                message=Message(role="assistant", content=f"search[red mug {number}]"),
                sampled=True,
                tokens=tokens,
                reward=random_.random(),
            ),
        ),
        head=1,
        stop=StopReason.TERMINATED if number % 4 else StopReason.MAX_TURNS,
        usage=Usage(prompt_tokens=8, completion_tokens=4, calls=1, steps=1),
        times=Times(started=float(number), finished=number + random_.random() * 100),
    )


def queries(count: int) -> dict[str, TrajectoryFilter]:
    """Pages that somebody wants to see of ``count`` trajectories."""
    best = TrajectoryFilter(sort=TrajectoryOrder.REWARD, descending=True, limit=PAGE)
    late = TrajectoryFilter(environment="grid", stop=StopReason.TERMINATED, reward_at_least=0.25)
    return {
        "newest first": TrajectoryFilter(descending=True, limit=PAGE),
        "best first": best,
        "the best of a run": best.model_copy(update={"run_id": "run-7"}),
        "far down by time": late.model_copy(update={"sort": TrajectoryOrder.FINISHED, "offset": count // 7}),
        "by outcome": TrajectoryFilter(stop=StopReason.MAX_TURNS, reward_at_most=0.5, limit=PAGE),
        "by task": TrajectoryFilter(task_id="goal-7", limit=PAGE),
        "by run": TrajectoryFilter(run_id="run-7", sort=TrajectoryOrder.FINISHED, limit=PAGE),
        "by version": TrajectoryFilter(adapter="policy", policy_version=0, descending=True, limit=PAGE),
        "by split": TrajectoryFilter(split="heldout", limit=PAGE),
        "by label": TrajectoryFilter(label="look again", limit=PAGE),
        "by time": TrajectoryFilter(since=count / 2, until=count / 2 + 1000, limit=PAGE),
    }


async def fill(folder: Path, count: int) -> None:
    """Store many small trajectories, without waiting for the disk."""
    async with FileTrajectoryStorage(folder, durable=False) as storage:
        for first in range(0, count, _BATCH):
            await asyncio.gather(*(storage.add(small(number)) for number in range(first, min(first + _BATCH, count))))
        tagged = [f"{number:08d}" for number in range(0, count, 20)]
        tag = Label(id="", trajectory_id="", kind=LabelKind.TAG, text="look again", at=0.0)
        await storage.add_labels([tag.model_copy(update={"id": each, "trajectory_id": each}) for each in tagged])


async def first_page(folder: Path, where: TrajectoryFilter) -> float:
    """Seconds until the first page is there, with a storage that is opened anew."""
    started = time.perf_counter()
    async with FileTrajectoryStorage(folder) as storage:
        page = 0
        async for _ in storage.find(where):
            page += 1
            if page == PAGE:
                break
        seconds = time.perf_counter() - started
    if not page:
        raise SystemExit("error: nothing was found")
    return seconds


def cold_first_page(folder: Path, where: TrajectoryFilter) -> float:
    """The same in a process of its own."""
    command = [sys.executable, "-m", __name__, str(folder), where.model_dump_json()]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


if __name__ == "__main__":
    print(asyncio.run(first_page(Path(sys.argv[1]), TrajectoryFilter.model_validate_json(sys.argv[2]))))
