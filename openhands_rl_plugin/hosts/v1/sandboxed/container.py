"""The workspace of a conversation in a container that another program owns: what stands in a sandbox's place there."""

from __future__ import annotations

import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject
from openhands_rl_plugin.environments.container import ContainerFiles, ContainerShell
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.environments.workspace.shell import CommandResult
from openhands_rl_plugin.environments.workspace.task_workspace import ContainerPlace

_MISSING = "the workspace is a container of another program, which judges it"


class ContainerWorkspace:
    """As ``SandboxedWorkspace``, without forks and without evidence. All methods block.

    The constructor raises ``InfrastructureError``. Where the container's owner fails, so does the episode, whatever the
    agent makes of it.
    """

    forks = False

    def __init__(self, place: ContainerPlace) -> None:
        self.start = self.inside = place.start
        self._shell = ContainerShell(place)
        self.private = Path(tempfile.mkdtemp(prefix="openhands-rl-container-")).resolve()

    def begin(self) -> None:
        """Nothing is evidence here."""

    def run(self, command: str, *, timeout: float | None) -> CommandResult:
        """As ``ContainerShell.run``."""
        return self._shell.run(command, timeout=timeout)

    def interrupt(self) -> None:
        """As ``ContainerShell.interrupt``."""
        self._shell.interrupt()

    def restart(self) -> None:
        """As ``ContainerShell.restart``."""
        self._shell.restart()

    def files(self) -> ContainerFiles:
        """Access to all files of the container, for one use of it."""
        return ContainerFiles(self._shell)

    def changes(self) -> JsonObject:
        """No patch, and why."""
        return {"git_patch": None, "git_patch_missing": _MISSING}

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """No evidence, and the failure of the container's owner, if any."""
        failed = self._shell.failure[:500]
        failure = Failure(kind=FailureKind.INFRASTRUCTURE, message=failed, boundary="container") if failed else None
        return self.changes(), failure

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Not run."""
        return CommandEvidence(command=asked.command, error=_MISSING)

    def check_copy(self, asked: WorkspaceCommand, stop: threading.Event) -> CommandEvidence:
        """Not run."""
        return self.check(asked)

    def fork(self, stop: threading.Event) -> NoReturn:
        """Raises ``BadEnvironmentError``."""
        raise BadEnvironmentError("a container of another program cannot be forked")

    def close(self) -> None:
        """End the command that is running. What runs in the background stays, for those who judge the work."""
        with suppress(InfrastructureError):
            self._shell.close()
        remove_tree(self.private)
