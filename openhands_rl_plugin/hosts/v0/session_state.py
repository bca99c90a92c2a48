"""State of a session outside its actions: the user's stop, the controller's end, the task list."""

from __future__ import annotations

import math
from typing import Any

from openhands.core.config import OpenHandsConfig
from openhands.core.config.mcp_config import MCPConfig, MCPStdioServerConfig
from openhands.core.schema import AgentState
from openhands.events.action import ChangeAgentStateAction, IPythonRunCellAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation, Observation
from openhands.events.stream import EventStream
from openhands.runtime.base import Runtime
from openhands.storage.locations import get_conversation_dir
from openhands.storage.memory import InMemoryFileStore

from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.sessions import register_runtime
from openhands_rl_plugin.session.session import Session


def is_stop(event: Event) -> bool:
    """Whether this event stops the agent."""
    return isinstance(event, ChangeAgentStateAction) and event.agent_state == AgentState.STOPPED


def controller_end(agent_state: str, last_error: str) -> tuple[StopReason, Failure | None]:
    """Why a controller stopped without the agent finishing, from its state ("error", "stopped") and last error.

    Reaching one of OpenHands' own limits is a regular end of an episode; anything else is a failure.
    """
    error = last_error.lower()
    if "maximum iteration" in error:
        return StopReason.MAX_TURNS, None
    if "maximum budget" in error or "stuckinloop" in error:
        return StopReason.TRUNCATED, None
    stopped = agent_state == "stopped"
    ended = "it was stopped before the agent had finished" if stopped else f"the controller ended in {agent_state!r}"
    message = last_error or ended
    return StopReason.ERROR, Failure(
        kind=FailureKind.INFRASTRUCTURE, message=message[:500], boundary="openhands.controller"
    )


class SessionTaskList:
    """A session's task list in memory, which replaces the event stream of a forked runtime."""

    def __init__(self, user_id: str | None, file_store: InMemoryFileStore) -> None:
        self.user_id = user_id
        self.file_store = file_store

    @classmethod
    def of(cls, stream: EventStream, session: str) -> Any:
        """A copy of the list of a stream or a fork. ``Any``, because OpenHands declares an ``EventStream`` there."""
        path = f"{get_conversation_dir(session, stream.user_id)}TASKS.md"
        try:
            return cls(stream.user_id, InMemoryFileStore({path: stream.file_store.read(path)}))
        except FileNotFoundError:
            return cls(stream.user_id, InMemoryFileStore())


class SessionRuntime(Runtime):
    """An OpenHands ``Runtime`` that the session's agent can find, and that ends a search when the user stops it."""

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        register_runtime(self.sid, self)
        self._session: Session | None = None
        self._stopped = -math.inf

    def decides(self, session: Session) -> None:
        """A stop of the user ends the decisions of ``session``, also one that was not there yet."""
        self._session = session
        session.cancel(self._stopped)

    def unsupported(self, what: str) -> ErrorObservation:
        """The observation for an action that needs ``what``."""
        return ErrorObservation(f"This runtime has no {what}.")

    def on_event(self, event: Event) -> None:
        """Also cancels a running or upcoming search when the user stops the agent."""
        if is_stop(event):
            self._stopped = event.id
            if self._session is not None:
                self._session.cancel(event.id)
        super().on_event(event)

    def run_ipython(self, action: IPythonRunCellAction) -> Observation:
        """Not supported; the observation tells the model what to do instead."""
        return self.unsupported("Jupyter: run Python with a shell command (enable_jupyter = false)")

    def browse(self, action: Any) -> Observation:
        """Not supported."""
        return self.unsupported("browser (enable_browsing = false)")

    browse_interactive = browse

    def get_mcp_config(self, extra_stdio_servers: list[MCPStdioServerConfig] | None = None) -> MCPConfig:
        """No servers: a session has no tools but its agent's."""
        return MCPConfig()
