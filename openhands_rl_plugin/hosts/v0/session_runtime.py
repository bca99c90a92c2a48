"""What the runtimes of this package share: they register for their session, and have no Jupyter, browser or MCP."""

from __future__ import annotations

from openhands.core.config import OpenHandsConfig
from openhands.core.config.mcp_config import MCPConfig, MCPStdioServerConfig
from openhands.events.action import BrowseInteractiveAction, BrowseURLAction, IPythonRunCellAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation, Observation
from openhands.runtime.base import Runtime

from openhands_rl_plugin.hosts.shared.sessions import register_runtime, stop_deciding
from openhands_rl_plugin.hosts.v0.session_state import is_stop


class SessionRuntime(Runtime):
    """An OpenHands ``Runtime`` that the session's agent can find, and that ends a search when the user stops it."""

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        register_runtime(self.sid, self)

    def unsupported(self, what: str) -> ErrorObservation:
        """The observation for an action that needs ``what``."""
        return ErrorObservation(f"This runtime has no {what}.")

    def on_event(self, event: Event) -> None:
        """Also cancels a running or upcoming search when the user stops the agent."""
        if is_stop(event):
            stop_deciding(self.sid, event.id)
        super().on_event(event)

    def run_ipython(self, action: IPythonRunCellAction) -> Observation:
        """Not supported."""
        return self.unsupported("Jupyter")

    def browse(self, action: BrowseURLAction) -> Observation:
        """Not supported."""
        return self.unsupported("browser (enable_browsing = false)")

    def browse_interactive(self, action: BrowseInteractiveAction) -> Observation:
        """Not supported."""
        return self.unsupported("browser (enable_browsing = false)")

    def get_mcp_config(self, extra_stdio_servers: list[MCPStdioServerConfig] | None = None) -> MCPConfig:
        """No servers: a session has no tools but its agent's."""
        return MCPConfig()
