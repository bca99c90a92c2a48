"""How a runtime learns that the user stops the agent, which is busy and does not hear it."""

from __future__ import annotations

from openhands.core.schema import AgentState
from openhands.events.action import ChangeAgentStateAction
from openhands.events.event import Event


def is_stop(event: Event) -> bool:
    """Whether the user stops the agent with this event."""
    return isinstance(event, ChangeAgentStateAction) and event.agent_state == AgentState.STOPPED
