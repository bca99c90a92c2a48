"""Plays a run of grid episodes into a store and says when it is done; for tests that kill it.

python keep_playing.py FOLDER      # appends a line for every completion it is asked for to FOLDER/asked.txt
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import Completion, EpisodeRequest, Limits, Message, StrategySpec, Task
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TASKS = tuple(
    Task(id=f"walk-{number}", environment="grid", data={"size": 5, "goal": [4, 3]}, limits=Limits(max_turns=9))
    for number in range(20)
)
PLAN = RolloutPlan(run_id="killed", tasks=TASKS, samples_per_task=2, concurrency=8)


class TellingEngine(ScriptedEngine):
    """Takes its time, and tells which turn of which episode it is asked about: ``<episode> <messages so far>``."""

    def __init__(self, request: EpisodeRequest, asked: int) -> None:
        super().__init__(lambda messages: "right" if len(messages) // 2 % 2 else "down")
        self._episode = trajectory_id(request)
        self._asked = asked

    async def complete(self, messages: Sequence[Message], **options: Any) -> list[Completion]:
        os.write(self._asked, f"{self._episode} {len(messages)}\n".encode())
        await asyncio.sleep(0.015)
        return await super().complete(messages, **options)


async def play(folder: Path) -> None:
    """Play what is missing."""
    asked = os.open(folder / "asked.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with FileTrajectoryStorage(folder / "store") as storage:
        runner = SessionRunner(
            make_environment=lambda request: GridEnvironment(),
            make_strategy=lambda request: StandardReActStrategy(),
            make_engine=lambda request: TellingEngine(request, asked),
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model="scripted",
            storage=storage,
        )
        print("playing", flush=True)
        await roll_out(PLAN, runner, storage)
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1])))
