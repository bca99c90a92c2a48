"""The seam between instances and the places they run in."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict


class InstanceBackend(Protocol):
    """A place where instances are set up and graded: a container engine, or this machine in sandboxes."""

    @property
    def name(self) -> str:
        """``local`` or ``docker``."""
        ...

    async def check(self) -> None:
        """Raise ``ConfigError``, one clear line, when instances cannot run here."""
        ...

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """The repository at its base commit in ``directory`` (which must not exist), without a trace of later commits.

        Raises ``InfrastructureError``.
        """
        ...

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """Apply ``patch`` and the row's tests to a fresh checkout and run them for at most ``timeout`` seconds.

        Never raises for what a patch does; what fails around it is a verdict of kind ``INFRASTRUCTURE``.
        """
        ...

    async def close(self) -> None:
        """Release what is held. Caches stay."""
        ...
