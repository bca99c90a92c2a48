"""What the recorder knows of a protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openhands_rl_plugin.models.engines.chunks import ServerEvent
from openhands_rl_plugin.models.engines.openai_wire import DONE
from openhands_rl_plugin.session.requests import ClientRequest, Unrecordable
from openhands_rl_plugin.session.responses import UpstreamResponse
from openhands_rl_plugin.session.token_id_text import Json, dump_object, parse_object

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "max_output_tokens": "length",
}
"""What chat completions call the reasons of other protocols; one that is not here keeps its name."""


class AnswerStream:
    """A streamed answer, event by event, of which all is passed on as it is.

    ``ending``: all has been said, and the client must not see the end before the answer is stored.
    ``done``: no event comes after this one. ``lost_ids``: some sampled tokens came without their ids.
    """

    def __init__(self, call: ClientRequest) -> None:
        self.problem = ""
        self.ending = False
        self.done = False
        self.lost_ids = False

    def feed(self, received: ServerEvent) -> bytes:
        """Take an event; returns what the client gets of it: one that cannot be recorded with a mark."""
        if received.data and received.data != DONE:
            data = parse_object(received.data)
            try:
                if data is None:
                    raise ValueError("an event of the stream is no JSON object")
                self.take(data)
            except (ValueError, TypeError, LookupError, AttributeError) as problem:
                self.problem = self.problem or str(problem) or "an event of the stream has an unknown format"
                return marked(received)
        return received.raw

    def whole(self) -> UpstreamResponse:
        """The answer as a chat completion. Raises ``Unrecordable`` when the events are none, or not all."""
        if self.problem or not self.ending:
            raise Unrecordable(self.problem or "the stream ended before its answer did")
        with _known_format("the response"):
            return self.read()

    def take(self, data: Json) -> None:
        """Read an event. Raises ``ValueError`` and others for one of an unknown format."""
        raise NotImplementedError

    def read(self) -> UpstreamResponse:
        """The response of all events. Raises ``Unrecordable``, and others as ``take``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """One protocol. ``path`` is below ``/v1``; ``reports_ids``: whether a server may report token ids in it.

    ``request`` and ``response`` read JSON of the protocol. ``error_event`` is an error in a stream that has begun.
    ``wanted``: the fields to add to a request, if they are accepted.
    """

    path: str
    request: Callable[[bytes], ClientRequest]
    response: Callable[[bytes], UpstreamResponse]
    stream: Callable[[ClientRequest], AnswerStream]
    error_event: Callable[[Json], bytes]
    reports_ids: bool = False
    wanted: Callable[[ClientRequest], Sequence[str]] = lambda call: ()

    def parse(self, body: bytes) -> ClientRequest:
        """A client's request. Raises ``Unrecordable``."""
        with _known_format("the request"):
            return self.request(body)

    def answer(self, body: bytes) -> UpstreamResponse:
        """A whole response. Raises ``Unrecordable``."""
        with _known_format("the response"):
            return self.response(body)


def as_completion(message: Json, reason: Any, usage: Json, about: Json) -> UpstreamResponse:
    """A chat completion with one choice, which stopped for this ``reason`` of another protocol."""
    finish = _FINISH_REASONS.get(str(reason), reason)
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return UpstreamResponse(dump_object({**about, "choices": [choice], "usage": usage}))


@contextmanager
def _known_format(what: str) -> Iterator[None]:
    """For JSON of any structure: raises ``Unrecordable`` for one that is not expected."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise Unrecordable(f"{what} has an unknown format ({type(error).__name__})") from error


def event(data: bytes, name: str = "") -> bytes:
    """One server-sent event."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % data


def marked(received: ServerEvent) -> bytes:
    """An event that makes the answer unrecordable, as it is, after a comment that says so: the headers are gone."""
    return b": not recorded: the next event has an unknown format\n\n" + received.raw


def texts_of(content: object, *types: str) -> str:
    """The texts of all parts of these types, joined; a text itself."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(
        str(part.get("text") or "") for part in parts if isinstance(part, dict) and part.get("type") in types
    )
