"""The sandboxed workspace of one conversation: its terminal, its editor, its evidence, and forks for search."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from openhands_rl_plugin.config.workspace import WorkspaceSettings
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.v1.sandboxed.container import ContainerWorkspace
from openhands_rl_plugin.hosts.v1.sandboxed.editor import ConversationEditor
from openhands_rl_plugin.hosts.v1.sandboxed.terminal import Terminal


class ConversationWorkspace:
    """What the tools ``terminal`` and ``file_editor`` of one conversation work on. All methods block."""

    def __init__(
        self, sandboxed: SandboxedWorkspace | ContainerWorkspace, terminal: Terminal, editor: ConversationEditor
    ) -> None:
        self.sandboxed = sandboxed
        self.terminal = terminal
        self.editor = editor
        self.closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: WorkspaceSettings,
        *,
        task: TaskWorkspace | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> ConversationWorkspace:
        """A workspace over ``folder``, which is used as it is, or over the task's.

        Raises ``ConfigError``, and ``InfrastructureError`` where the task's is a container that does not answer.
        """
        if task is not None and task.container is not None:
            contained = ContainerWorkspace(task.container)
            return cls(contained, Terminal(contained), ConversationEditor(contained))
        sandboxed = SandboxedWorkspace(folder, settings, task=task, variables=variables)
        return cls(sandboxed, Terminal(sandboxed), ConversationEditor(sandboxed))

    @property
    def forks(self) -> bool:
        """Whether it can be forked at all."""
        return self.sandboxed.forks

    def fork(self, stop: threading.Event) -> ConversationWorkspace:
        """As ``SandboxedWorkspace.fork``, with the editor's history."""
        if self.terminal.busy:
            raise BadEnvironmentError("the workspace cannot be forked while a command runs in its terminal")
        sandboxed = self.sandboxed.fork(stop)
        return ConversationWorkspace(sandboxed, self.terminal.forked(sandboxed), self.editor.forked(sandboxed))

    def begin(self) -> None:
        """As ``SandboxedWorkspace.begin``."""
        self.sandboxed.begin()

    def changes(self) -> JsonObject:
        """As ``SandboxedWorkspace.changes``."""
        return self.sandboxed.changes()

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """As ``SandboxedWorkspace.conclude``."""
        return self.sandboxed.conclude()

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """As ``SandboxedWorkspace.check``."""
        return self.sandboxed.check(asked)

    def check_copy(self, asked: WorkspaceCommand, stop: threading.Event) -> CommandEvidence:
        """As ``SandboxedWorkspace.check_copy``."""
        return self.sandboxed.check_copy(asked, stop)

    def close(self) -> None:
        """End all processes and remove what is not the folder itself. Idempotent."""
        self.closed = True
        self.sandboxed.close()
