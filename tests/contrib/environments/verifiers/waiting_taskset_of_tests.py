"""A taskset whose environment is slow: it waits for a file, or holds up everything in its process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Waiting", "WaitingEnv"]


class WaitingData(vf.TaskData):
    way: str
    folder: str


class WaitingConfig(vf.TasksetConfig):
    folder: str = ""


class Waiting(vf.Taskset[vf.Task[WaitingData, vf.State, vf.TaskConfig], WaitingConfig]):
    def load(self):
        for way in ("at once", "waits", "blocks"):
            data = WaitingData(prompt="Say hello.", way=way, folder=self.config.folder)
            yield vf.Task[WaitingData, vf.State, vf.TaskConfig](data, self.config.task)


class WaitingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class WaitingEnv(vf.Env[WaitingEnvConfig]):
    async def run(self, task, agents):
        folder = Path(task.data.folder)
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            if task.data.way == "blocks":
                time.sleep(3600)
            if task.data.way == "waits":
                while not (folder / "gate").exists():
                    await asyncio.sleep(0.05)
                last = await interaction.turn("Go on.")
                (folder / "ended").write_text(f"{last.terminated} {interaction.trace.stop_condition}")
        interaction.trace.record_reward("said", 1.0, 1.0)
