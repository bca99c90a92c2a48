"""What OpenHands' runtime writes beside events, for a forked runtime, which has no event stream."""

from __future__ import annotations

from typing import Any

from openhands.events.stream import EventStream
from openhands.storage.locations import get_conversation_dir
from openhands.storage.memory import InMemoryFileStore


class SessionNotes:
    """Stands where a runtime expects its event stream: it holds the task list of the session, in memory."""

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
