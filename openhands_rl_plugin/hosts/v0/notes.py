"""What a runtime hears and writes beside its actions: the user's stop, and the notes of a session."""

from __future__ import annotations

from typing import Any

from openhands.core.schema import AgentState
from openhands.events.action import ChangeAgentStateAction
from openhands.events.event import Event
from openhands.events.stream import EventStream
from openhands.storage.locations import get_conversation_dir
from openhands.storage.memory import InMemoryFileStore


def is_stop(event: Event) -> bool:
    """Whether the user stops the agent with this event."""
    return isinstance(event, ChangeAgentStateAction) and event.agent_state == AgentState.STOPPED


class SessionNotes:
    """A session's task list in memory, for a forked runtime: it stands where OpenHands expects an event stream."""

    def __init__(self, user_id: str | None, file_store: InMemoryFileStore) -> None:
        self.user_id = user_id
        self.file_store = file_store

    @classmethod
    def of(cls, stream: EventStream, session: str) -> Any:
        """A copy of what a stream, or other notes, hold. ``Any``, because OpenHands declares a whole stream there."""
        path = f"{get_conversation_dir(session, stream.user_id)}TASKS.md"
        try:
            return cls(stream.user_id, InMemoryFileStore({path: stream.file_store.read(path)}))
        except FileNotFoundError:
            return cls(stream.user_id, InMemoryFileStore())
