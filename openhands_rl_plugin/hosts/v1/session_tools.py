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
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.options import HostOptions


@dataclass(frozen=True)
class SessionTools:
    """``folder`` is what the SDK takes for its workspace; ``private``: it is removed with the session."""

    tools: Sequence[Tool]
    folder: Path
    private: bool

    def close(self) -> None:
        """Remove the folder, if nobody else has it. Blocks."""
        if self.private:
            remove_tree(self.folder)


def session_tools(settings: RLSettings, options: HostOptions, episode: HostEpisode) -> SessionTools:
    """The tools of an episode's session. Raises ``ConfigError`` where they cannot be isolated as asked."""
    check_isolation(settings, options)
    given = episode.workspace
    folder = Path(tempfile.mkdtemp(prefix="openhands-rl-")) if given is None else given.root / given.repository
    terminal = Tool(name=TerminalTool.name, params={"no_change_timeout_seconds": options.command_timeout})
    return SessionTools((terminal, Tool(name=FileEditorTool.name)), folder.resolve(), private=given is None)


def check_isolation(settings: RLSettings, options: HostOptions) -> None:
    """Raise ``ConfigError`` unless no isolation is asked for: the SDK's tools have the rights of this process."""
    if (options.isolation or settings.workspace.isolation) != "none":
        raise ConfigError(
            "[rl.workspace] isolation: the tools of OpenHands V1 run with the rights of this process; set "
            'isolation = "none" where that is right, or [rl] host = "v0"'
        )
