"""A taskset without any reward."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Unpaid"]


class Unpaid(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], vf.TasksetConfig]):
    def load(self):
        yield vf.Task[vf.TaskData, vf.State, vf.TaskConfig](vf.TaskData(prompt="Say hello."), self.config.task)
