"""The tools and the folder of a runner's session."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands.sdk import Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.v1.sandboxed.workspace import ConversationWorkspace


@dataclass(frozen=True)
class SessionTools:
    """``folder`` is what the SDK takes for its workspace; ``private``: it is removed with the session.

    ``workspace`` is the sandbox of the tools; ``None`` where they are the SDK's own, with the rights of this process.
    ``prompt`` is that of ``[rl.workspace]``.
    """

    tools: Sequence[Tool]
    folder: Path
    private: bool
    workspace: ConversationWorkspace | None
    prompt: PromptName

    @property
    def rl(self) -> dict[str, object]:
        """What the agent says of its tools."""
        isolation = {"isolation": "none"} if self.workspace is None else {}
        return {"workspace": {**isolation, "prompt": self.prompt}}

    def close(self) -> None:
        """End the sandbox, and remove the folder if nobody else has it. Blocks."""
        if self.workspace is not None:
            self.workspace.close()
        if self.private:
            remove_tree(self.folder)


def session_tools(settings: RLSettings, options: HostOptions, episode: HostEpisode) -> SessionTools:
    """The tools of an episode's session. Raises ``ConfigError`` where they cannot be isolated as asked."""
    given = episode.workspace
    folder = Path(tempfile.mkdtemp(prefix="openhands-rl-")) if given is None else given.root / given.repository
    workspace = None
    if is_isolated(settings, options) or (given is not None and given.container is not None):
        workspace = ConversationWorkspace.open(folder, settings.workspace, task=given)
    terminal = Tool(name=TerminalTool.name, params={"no_change_timeout_seconds": options.command_timeout})
    tools = (terminal, Tool(name=FileEditorTool.name))
    prompt = settings.workspace.prompt
    return SessionTools(tools, folder.resolve(), private=given is None, workspace=workspace, prompt=prompt)


def is_isolated(settings: RLSettings, options: HostOptions) -> bool:
    """Whether the tools work in bubblewrap."""
    return (options.isolation or settings.workspace.isolation) != "none"
