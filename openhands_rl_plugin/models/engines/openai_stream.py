"""A streamed chat completion: yields its text as it arrives, and returns the complete response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.models.engines.chunks import ChunkAssembler
from openhands_rl_plugin.models.engines.event_stream import EventStreamReader

DONE = b"[DONE]"


class StreamedAnswer:
    """Parses the bytes of an event stream with one choice."""

    def __init__(self) -> None:
        self._events = EventStreamReader()
        self._parts = ChunkAssembler()
        self._done = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The text of all events that ``data`` completes. Raises ``ModelError`` and ``InfrastructureError``."""
        for event in self._events.feed(data):
            if event.data and not self._done and (text := self._take(event.data)):
                yield text

    def whole(self) -> bytes:
        """The response as if it had not been streamed. Raises ``InfrastructureError`` when the stream is incomplete."""
        if not self._done and not self._parts.finished:
            raise InfrastructureError("the stream of the model server ended before its answer did")
        document = self._parts.document()
        return json.dumps({**document, "choices": document["choices"][:1]}).encode()

    def _take(self, data: bytes) -> str:
        if data == DONE:
            self._done = True
            return ""
        try:
            chunk = json.loads(data.decode("utf-8", errors="replace"))
            error = chunk.get("error")
            self._parts.add(chunk)
        except (ValueError, AttributeError, RecursionError) as problem:
            shown = " ".join(data[:200].decode("utf-8", errors="replace").split())
            raise ModelError(
                f"the model server's stream is not a chat completion (check base_url): {shown}"
            ) from problem
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else error
            raise InfrastructureError(f"the model server sent an error in its stream: {str(message)[:300]}")
        return "".join(_text(choice) for choice in chunk.get("choices") or () if choice.get("index", 0) == 0)


def _text(choice: dict[str, Any]) -> str:
    return whole_text((choice.get("delta") or {}).get("content") or "")
