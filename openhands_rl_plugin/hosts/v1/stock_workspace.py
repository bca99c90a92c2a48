"""The folder in which the SDK's own tools work: what changed there, and what a reward's command says of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.check import check_workspace
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits, SubprocessSandbox


class StockWorkspace:
    """The evidence of one episode in ``folder``, whose tools have the rights of this process. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="openhands-rl-")).resolve()
        self._folder = folder.resolve()
        self._baseline = Baseline(self._folder, self._private)
        self._evidence: JsonObject | None = None
        self._missing = ""
        try:
            self._sandbox = SubprocessSandbox(self._folder, self._private)
            self._baseline.remember(self._sandbox)
        except ConfigError as error:
            self._missing = str(error)

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """The changes since the episode began, and no failure. A second call returns the same."""
        if self._missing:
            return {"git_patch": None, "git_patch_missing": self._missing}, None
        if self._evidence is None:
            self._evidence = self._baseline.changes(self._sandbox)
        return self._evidence, None

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a reward's command over the folder as it stands."""
        if self._missing:
            return CommandEvidence(command=asked.command, error=self._missing)
        sandbox = SubprocessSandbox(self._folder, self._private / "check")
        return check_workspace(asked, sandbox, {}, SandboxLimits())

    def close(self) -> None:
        """Remove what was recorded of the start."""
        remove_tree(self._private)
