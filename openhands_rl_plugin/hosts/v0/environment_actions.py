"""The agent's side of an environment behind OpenHands' runtime: its actions, and replies from the history."""

from __future__ import annotations

from collections.abc import Sequence

from openhands.events.action.mcp import MCPAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation
from openhands.events.observation.mcp import MCPObservation
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.types import Failure, FailureKind, Message
from openhands_rl_plugin.hosts.shared.environment_reply import RESET_TOOL, STEP_TOOL, EnvironmentReply


class EnvironmentActions:
    """The actions and replies of one episode."""

    def __init__(self) -> None:
        self.opened = False
        self._last_read = -1

    def reset(self) -> MCPAction:
        """The action that begins the episode."""
        self.opened = True
        return MCPAction(name=RESET_TOOL, arguments={})

    def act(self, answer: Message) -> MCPAction:
        """The action that executes an answer of the policy."""
        return MCPAction(name=STEP_TOOL, arguments={"content": answer.content or ""})

    def reply(self, history: Sequence[Event]) -> EnvironmentReply:
        """The environment's reply to the last action; a missing or invalid reply is a failure."""
        for event in reversed(history):
            if event.id <= self._last_read:
                break
            if isinstance(event, MCPObservation):
                self._last_read = event.id
                return _parsed(event.content)
            if isinstance(event, ErrorObservation):
                self._last_read = event.id
                return _failed(event.content)
        return _failed("the runtime did not answer")


def _parsed(content: str) -> EnvironmentReply:
    try:
        return EnvironmentReply.model_validate_json(content)
    except ValidationError as error:
        return _failed(f"the runtime's answer is not an environment's reply: {describe(error)}")


def _failed(message: str) -> EnvironmentReply:
    failure = Failure(kind=FailureKind.ENVIRONMENT, message=message[:500], boundary="openhands.runtime")
    return EnvironmentReply(failure=failure)
