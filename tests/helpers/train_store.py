"""A store with a few episodes of one task, and options of ``train`` that end in a second."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.types import Message, Node, PolicyRef, Score, StopReason, Task, Tokens, Trajectory
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TINY = ["--set", "training.dtype=float32", "training.lora_rank=2"]
TINY += ["training.num_epochs=1", "training.learning_rate=1e-2"]


def episode(number: int, reward: float, *, base_model: str = "tiny", **changes: object) -> Trajectory:
    """Two turns of one task; the same prompt in all episodes."""
    numbers = random.Random(number)
    prompt = tuple(range(10, 50))
    nodes = [Node(parent=None, message=Message(role="user", content="?"))]
    for turn in range(2):
        sampled = tuple(numbers.randrange(2, 400) for _ in range(5))
        tokens = Tokens(
            extends=turn > 0,
            prompt_ids=(7, 8, 9) if turn else prompt,
            sampled_ids=sampled,
            logprobs=tuple(-5.0 - numbers.random() for _ in sampled),
        )
        answer = Message(role="assistant", content="!")
        rewarded = reward if turn else 0.0
        nodes.append(Node(parent=len(nodes) - 1, message=answer, sampled=True, tokens=tokens, reward=rewarded))
    update = {
        "id": f"episode-{base_model}-{number}",
        "task": Task(id="task", environment="shop"),
        "group_id": "group",
        "policy": PolicyRef(base_model=base_model),
        "nodes": tuple(nodes),
        "head": 2,
        "failure": None,
        "stop": StopReason.TERMINATED,
        **changes,
    }
    return example_trajectory(number).model_copy(update=update)


def store_of(path: Path, *episodes: Trajectory, scores: Sequence[Score] = ()) -> Path:
    async def fill() -> None:
        async with FileTrajectoryStorage(path) as storage:
            for each in episodes:
                await storage.add(each)
            await storage.add_scores(scores)

    asyncio.run(fill())
    return path


def stored(path: Path) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    async def read() -> list[tuple[Trajectory, tuple[Score, ...]]]:
        async with FileTrajectoryStorage(path) as storage:
            return [found async for found in storage.find()]

    return asyncio.run(read())
