"""The SDK's tools ``terminal`` and ``file_editor``: for an ``RLAgent`` in bubblewrap, for all others the stock ones.

Importing this module registers them. What the model is told of the tools is the SDK's own text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationState
from openhands.sdk.tool import ToolExecutor, register_tool
from openhands.tools.file_editor.definition import FileEditorAction, FileEditorObservation, FileEditorTool
from openhands.tools.terminal.definition import TerminalAction, TerminalObservation, TerminalTool

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.shared.sessions import protected_by, register_runtime, runtime_of
from openhands_rl_plugin.hosts.v1.workspace import ContainerWorkspace, ConversationWorkspace
from openhands_rl_plugin.session.session import current_episode

TERMINAL, EDITOR = TerminalTool.name, FileEditorTool.name
_OUTPUT = 2 * 1024**2

_opening = threading.Lock()


def workspace_of(state: ConversationState) -> ConversationWorkspace | None:
    """The conversation's sandboxed workspace; ``None`` where its tools are the stock ones.

    One that was registered under the conversation's id, or else one over its folder, as the agent's settings ask for.
    Raises ``ConfigError``.
    """
    session = str(state.id)
    with _opening:
        found = runtime_of(session)
        if isinstance(found, ConversationWorkspace) and not found.closed:
            return found
        bound, own = getattr(state.agent, "delegated_by", None) or current_episode(), getattr(state.agent, "rl", None)
        if bound is None and not isinstance(own, dict):
            return None
        settings = bound.settings if bound is not None else settings_from_sections({"rl": own})
        folder = Path(str(state.workspace.working_dir))
        return open_workspace(session, settings, folder, bound.workspace if bound is not None else None)


def open_workspace(
    session: str, settings: RLSettings, folder: Path, task: TaskWorkspace | None
) -> ConversationWorkspace | None:
    """A workspace registered under a conversation's id, weakly; ``None`` where nothing isolates it.

    It is over ``folder``, which is used as it is, or over the task's. Raises ``ConfigError``, and
    ``InfrastructureError`` where the task's is a container that does not answer.
    """
    if task is not None and task.container is not None:
        place = ContainerWorkspace(task.container)
    elif settings.workspace.isolation == "none":
        return None
    else:
        protected = protected_by(settings.reward)
        place = SandboxedWorkspace(folder, settings.workspace, task=task, protected=protected, output=_OUTPUT)
    opened = ConversationWorkspace(place)
    register_runtime(session, opened)
    return opened


class RLTerminalTool(TerminalTool):
    """Makes the tool ``terminal`` of a conversation."""

    @classmethod
    def create(cls, conv_state: ConversationState, *args: Any, **params: Any) -> Sequence[TerminalTool]:
        """The SDK's tool, with our executor in a sandboxed workspace."""
        workspace = workspace_of(conv_state)
        if workspace is None:
            return TerminalTool.create(conv_state, *args, **params)
        if (seconds := params.get("no_change_timeout_seconds")) is not None:
            workspace.terminal.seconds = float(seconds)
        return TerminalTool.create(conv_state, executor=_TerminalExecutor(workspace))


class RLFileEditorTool(FileEditorTool):
    """Makes the tool ``file_editor`` of a conversation."""

    @classmethod
    def create(cls, conv_state: ConversationState, **params: Any) -> Sequence[FileEditorTool]:
        """The SDK's tool, with our executor in a sandboxed workspace."""
        made = FileEditorTool.create(conv_state, **params)
        workspace = workspace_of(conv_state)
        if workspace is None:
            return made
        host, inside = str(conv_state.workspace.working_dir), workspace.sandboxed.start
        executor = _FileEditorExecutor(workspace)
        told = {"description": made[0].description.replace(f": {host}\n", f": {inside}\n")}
        return [made[0].model_copy(update=told).set_executor(executor)]


class _TerminalExecutor(ToolExecutor[TerminalAction, TerminalObservation]):
    """Holds the workspace, which is registered by a weak reference. Secrets are treated as by the SDK's own."""

    def __init__(self, workspace: ConversationWorkspace) -> None:
        self._workspace = workspace

    def __call__(self, action: TerminalAction, conversation: LocalConversation | None = None) -> TerminalObservation:
        terminal = self._workspace.terminal
        if conversation is None:
            return terminal.execute(action)
        secrets = conversation.state.secret_registry
        if not action.is_input:
            terminal.export(secrets.get_secrets_as_env_vars(action.command))
        said = terminal.execute(action)
        masked = secrets.mask_secrets_in_output(said.text)
        told = TerminalObservation.from_text(text=masked, command=None)
        return said.model_copy(update={"content": told.content})

    def interrupt(self) -> None:
        """Send Ctrl-C to a command that is running."""
        self._workspace.terminal.interrupt()

    def close(self) -> None:
        """End the session's sandbox."""
        self._workspace.close()


class _FileEditorExecutor(ToolExecutor[FileEditorAction, FileEditorObservation]):
    def __init__(self, workspace: ConversationWorkspace) -> None:
        self._workspace = workspace

    def __call__(
        self, action: FileEditorAction, conversation: LocalConversation | None = None
    ) -> FileEditorObservation:
        return self._workspace.editor.edit(action)

    def close(self) -> None:
        """End the session's sandbox."""
        self._workspace.close()


def _register() -> None:
    said = logging.getLogger("openhands.sdk.tool.registry")
    for kind, stock in ((RLTerminalTool, TerminalTool), (RLFileEditorTool, FileEditorTool)):
        # Where a conversation is made by a client, the server imports the module of its tools: one that it has.
        kind.__module__ = stock.__module__
        said.disabled = True
        register_tool(stock.name, kind)
        said.disabled = False


_register()
