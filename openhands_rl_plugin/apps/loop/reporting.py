"""Keeps the facts and the report of a run up to date while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, StorageError, boundary
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.training.loop.facts import HeldOut, RunFacts
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState
from openhands_rl_plugin.training.loop.stages import LoopListener

REPORT = "report.html"
"""The run's page, which the studio writes."""


def report_writer() -> Any | None:
    """The module that writes reports: the entry point ``studio`` of the group ``openhands_rl_plugin.reports``.

    ``None`` where no package has it, or where it cannot be loaded.
    """
    try:
        return registry.find("reports", "studio") if "studio" in registry.names("reports") else None
    except ConfigError:
        return None


class RunReport(LoopListener):
    """Passes everything on to ``listener``, and writes facts and report after each stage.

    ``model``: the folder of the base model, whose tokenizer tokens are shown with. A report that cannot be written is
    noted, and the run goes on.
    """

    def __init__(
        self,
        listener: LoopListener,
        facts: RunFacts,
        plan: LoopPlan,
        *,
        directory: Path,
        storage: TrajectoryStorage,
        adapters: Path,
        model: Path,
        reward_version: str,
    ) -> None:
        self.stage_started = listener.stage_started
        self.noted = listener.noted
        self.advanced = listener.advanced
        self.episode_finished = listener.episode_finished
        self.stage_finished = listener.stage_finished
        self.facts = facts
        self.path = directory / REPORT
        self._held_out = HeldOut(plan, storage, reward_version)
        self._storage = storage
        self._adapters = adapters
        self._model = model

    async def stage_saved(self, state: LoopState) -> None:
        """Write both."""
        await self.write(state)

    async def write(self, state: LoopState) -> None:
        """The facts and the report of what is finished."""
        try:
            with boundary(FailureKind.INFRASTRUCTURE, REPORT):
                changes, samples = await self._held_out.changes(state), await self._held_out.samples(state)
                self.facts = self.facts.model_copy(update={"changes": changes, "samples": samples})
                self.facts.save(self.path.parent)
                if (writer := report_writer()) is not None:
                    where = self.path.parent, self._storage, self._adapters
                    await writer.write_run_report(*where, tokenizer=str(self._model))
        except CaughtFailure as error:
            self.noted(f"{self.path} was not written: {error.failure.message}")
        except StorageError as error:
            self.noted(f"{self.path} was not written: {error}")
