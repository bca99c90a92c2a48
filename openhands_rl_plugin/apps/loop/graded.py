"""Software tasks in a loop: an episode ends with the verdict of its tests, which is stored as its score."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.evals.runs.judged import Entry, Player


class GradedRunner:
    """An ``EpisodeRunner`` over a ``Player``, which knows the rows of the tasks."""

    def __init__(self, player: Player, entries: Sequence[Entry]) -> None:
        self._player = player
        self._entries = {entry.task.id: entry for entry in entries}

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play, store and grade one episode; a failed one is returned."""
        return (await self._player.play(request, self._entries[request.task.id])).trajectory

    async def close(self) -> None:
        """The player is closed by who opened it."""
