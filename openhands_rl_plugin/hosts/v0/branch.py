"""A branch of an OpenHands session that works in a workspace, for search.

It is a forked runtime and a list of events, over which the agent's own ``step`` runs, without a controller and event
files. That is enough, because a prompt depends on events only, which are serialized to JSON and back as in the live
stream. A controller would not change the prompt, but cost a quarter of a second and several threads per branch. No
event of a branch reaches the live stream.

Not simulated in a branch: knowledge that microagents add to the continuing message when the model calls no tool,
condensation of the branch's own events, and OpenHands' own limits of a session. Where the real prompt then differs from
the simulated one, a new branch of the tree begins.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from openhands.agenthub.codeact_agent.codeact_agent import CodeActAgent
from openhands.controller.state.state import State
from openhands.events import EventSource
from openhands.events.action import (
    Action,
    AgentFinishAction,
    AgentRejectAction,
    AgentThinkAction,
    MessageAction,
    TaskTrackingAction,
)
from openhands.events.action.mcp import MCPAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation, NullObservation
from openhands.events.observation import Observation as HostObservation
from openhands.events.serialization.event import event_from_dict, event_to_dict
from openhands.memory.condenser.impl.no_op_condenser import NoOpCondenser
from openhands.memory.view import View

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import command_seconds
from openhands_rl_plugin.hosts.v0.completion import ANSWERED
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.token_id_text import Json

if TYPE_CHECKING:
    from openhands_rl_plugin.hosts.v0.agent import RLAgent

_ENDS = (AgentFinishAction, AgentRejectAction)
_NOT_RUN = (AgentThinkAction, TaskTrackingAction)


class _View(NoOpCondenser):
    """The live view of the history, and what a branch adds to it."""

    def __init__(self, forgotten: set[int]) -> None:
        self._forgotten = forgotten

    def condensed_history(self, state: State) -> View:
        return View(events=state.history, forgotten_event_ids=self._forgotten)


@dataclass
class SessionBranch:
    """A ``Branch`` of the session of ``agent``; the live one itself where ``runtime`` is the live one.

    ``events`` and ``forgotten`` (ids) are the history as the agent sees it.
    """

    agent: RLAgent
    state: State
    live: WorkspaceRuntime
    runtime: WorkspaceRuntime
    events: list[Event]
    forgotten: set[int]
    stop: threading.Event

    def fork(self) -> SessionBranch:
        """As ``Branch.fork``."""
        return replace(self, runtime=self.runtime.fork(self.stop), events=[*self.events])

    def run(self, complete: Complete) -> None:
        """As ``Branch.run``. Raises ``BadEnvironmentError`` for an action that a fork cannot execute."""
        agent = copy.copy(self.agent)
        agent.llm, agent.pending_actions, agent.condenser = agent.model_of(complete), deque(), _View(self.forgotten)
        initial = agent._get_initial_user_message(self.state.history)
        agent._get_initial_user_message = lambda history: initial
        live = self.state
        state = State(session_id=live.session_id, iteration_flag=live.iteration_flag, history=self.events)
        while True:
            try:
                action = CodeActAgent.step(agent, state)
            except ANSWERED as error:
                self._record(ErrorObservation(str(error)), EventSource.AGENT)
                continue
            done = self._record(action, EventSource.AGENT)
            if isinstance(done, _ENDS):
                return
            if isinstance(done, MessageAction):
                self._record(MessageAction(content=_continuing_message()), EventSource.USER)
            elif not isinstance(observation := self._observe(done), NullObservation):
                self._record(observation, EventSource.AGENT)

    def seconds(self, answer: Json) -> float:
        """As ``Branch.seconds``."""
        return command_seconds(answer, self.runtime.config.sandbox.timeout)

    def evidence(self) -> JsonObject:
        """As ``Branch.evidence``."""
        return self.runtime.workspace.changes()

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """As ``Branch.check``."""
        return self.runtime.check(asked)

    def close(self) -> None:
        """As ``Branch.close``."""
        self.runtime.close()

    def _record(self, event: Event, source: EventSource) -> Any:
        """Add the event as the live stream would return it, without adding it there."""
        # OpenHands declares these as properties without setters, and sets them like this itself.
        holder: Any = event
        holder._id = (self.events[-1].id if self.events else 0) + 1
        holder._source, holder._timestamp = source, datetime.now().isoformat()
        recorded = event_from_dict(self.live.event_stream._replace_secrets(event_to_dict(event)))
        self.events.append(recorded)
        return recorded

    def _observe(self, action: Action) -> HostObservation:
        """The observation of an action, as when OpenHands' runtime gets it from the event stream."""
        if not (action.runnable or isinstance(action, _NOT_RUN)):
            raise BadEnvironmentError(f"{type(action).__name__} cannot be executed in a fork of the workspace")
        if action.timeout is None:
            action.set_hard_timeout(self.runtime.config.sandbox.timeout, blocking=False)
        try:
            if isinstance(action, MCPAction):
                observation = asyncio.run(self.runtime.call_tool_mcp(action))
            else:
                observation = self.runtime.run_action(action)
        except PermissionError as error:
            observation = ErrorObservation(str(error))
        holder: Any = observation
        holder._cause, holder.tool_call_metadata = action.id, action.tool_call_metadata
        return observation


def _continuing_message() -> str:
    """The user message of headless sessions for a model that called no tool."""
    # Not at the top: OpenHands' own main module may be importing this package right now.
    from openhands.core.main import auto_continue_response

    return auto_continue_response(State())
