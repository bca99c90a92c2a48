"""A taskset with a tool, as a user of verifiers 0.4 writes it."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Shelf"]


class ShelfTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def count(self, what: str) -> str:
        """How many there are."""
        return f"{len(what)} {what}"


class ShelfData(vf.TaskData):
    what: str


class ShelfTask(vf.Task[ShelfData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [ShelfTools(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def counted(self, trace: vf.Trace) -> float:
        used = any(f"{len(self.data.what)} {self.data.what}" in str(m.content) for m in trace.tool_messages)
        return float(used and str(len(self.data.what)) in trace.last_reply)


class Shelf(vf.Taskset[ShelfTask, vf.TasksetConfig]):
    def load(self):
        for what in ("books", "lamps!"):
            yield ShelfTask(ShelfData(prompt=f"How many {what} are there?", what=what), self.config.task)


if __name__ == "__main__":
    ShelfTools.run()
