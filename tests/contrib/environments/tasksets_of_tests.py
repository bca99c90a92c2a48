"""Tasksets as a user of verifiers 0.4 writes them: an answer, a conversation. Imported by verifiers' Python."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / max(1, len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        print("a taskset may print")
        for n in range(3):
            data = SumData(prompt=f"What is {n} + {n}?", system_prompt="Answer with a number.", answer=2 * n)
            yield SumTask(data, self.config.task)
