"""The protocol of back ends, which set up and grade instances."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict


class InstanceBackend(Protocol):
    """Sets up and grades instances: with a container engine, or in sandboxes on this machine."""

    @property
    def name(self) -> str:
        """``local`` or ``docker``."""
        ...

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        ...

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """The repository at its base commit in ``directory`` (which must not exist), without later commits.

        Raises ``InfrastructureError``.
        """
        ...

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """Apply ``patch`` and the row's tests to a fresh checkout and run them for at most ``timeout`` seconds, which
        do not include what the script does before the tests.

        Never raises for what a patch does; an infrastructure failure is a verdict of kind ``INFRASTRUCTURE``.
        """
        ...

    async def close(self) -> None:
        """Release resources. Caches stay."""
        ...
