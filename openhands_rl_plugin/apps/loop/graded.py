"""Software tasks in a loop: an episode ends with its tests, whose result is stored as its score."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.evals.runs.outcome import EvalRunner, EvalTask


class GradedRunner:
    """An ``EpisodeRunner`` over an ``EvalRunner``, which knows the rows of the tasks."""

    def __init__(self, runner: EvalRunner, entries: Sequence[EvalTask]) -> None:
        self._runner = runner
        self._entries = {entry.task.id: entry for entry in entries}

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run, store and grade one episode; a failed one is returned."""
        return (await self._runner.run(request, self._entries[request.task.id])).trajectory

    async def close(self) -> None:
        """Does nothing: the caller owns the ``EvalRunner`` and closes it."""
