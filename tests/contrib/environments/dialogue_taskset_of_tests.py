"""A taskset whose environment answers turn by turn, as a user of verifiers 0.4 writes it."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Dialogue", "DialogueEnv"]


class DialogueData(vf.TaskData):
    secret: int


class DialogueTask(vf.Task[DialogueData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def polite(self, trace: vf.Trace) -> float:
        return float("please" in " ".join(m.content or "" for m in trace.assistant_messages))


class Dialogue(vf.Taskset[DialogueTask, vf.TasksetConfig]):
    def load(self):
        for secret in (3, 7, 5):
            yield DialogueTask(DialogueData(prompt="Guess a number from 1 to 9.", secret=secret), self.config.task)


class DialogueConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class DialogueEnv(vf.Env[DialogueConfig]):
    async def run(self, task, agents):
        tries = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                tries += 1
                text = "".join(each for each in segment.last_reply if each.isdigit())
                if text == str(task.data.secret) or tries == 4:
                    break
                segment = await interaction.turn("higher" if text and int(text) < task.data.secret else "lower")
        won = text == str(task.data.secret)
        interaction.trace.record_reward("won", 1.0 / tries if won else 0.0, 1.0)
