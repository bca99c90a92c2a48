"""What a session reads and writes on the wire: requests of clients, and streams of chat completions.

Chat completions are OpenAI's protocol, in which vLLM and others report token ids. ``imitation.py`` has those without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from openhands_rl_plugin.core.messages import (
    WireMessage,
    calls_in,
    error_in,
    recorded_parameters,
    sampling_in,
    wire_calls,
)
from openhands_rl_plugin.core.types import JsonObject, SamplingParams
from openhands_rl_plugin.models.engines.chunks import ChunkAssembler, ServerEvent
from openhands_rl_plugin.models.engines.extensions import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    ExtensionAttempt,
    extension_values,
)
from openhands_rl_plugin.models.engines.openai_wire import (
    DEEPEST,
    DONE,
    IDS,
    ChatAnswer,
    Json,
    Unrecordable,
    chat_answer,
    dump_object,
    event,
    parse_object,
    reading,
    without,
)
from openhands_rl_plugin.session.sampled_texts import SampledCalls

STREAM_OPTIONS = "stream_options"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(slots=True)
class ClientRequest:
    """One request for a completion. ``body`` is the client's text, ``document`` the parsed object.

    ``messages``, ``tools`` and ``settings`` (the sampling parameters) are in the format of chat completions, whatever
    the protocol. ``wanted``: the fields to add to it, if they are accepted; ``hidden``: what only these bring into the
    answer. ``instructions``: whether the first message holds for this request only. ``continues``: the id of an
    earlier response whose conversation comes before ``messages``. ``unknown_before``: why it is not known what does.

    Since it was sent it has an ``attempt``, and ``started``, a time of ``perf_counter``.
    """

    body: bytes
    document: Json
    messages: Sequence[WireMessage]
    tools: tuple[JsonObject, ...]
    settings: Json
    wanted: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()
    instructions: bool = False
    continues: str = ""
    unknown_before: str = ""
    protocol: WireProtocol = field(init=False)
    attempt: ExtensionAttempt = field(init=False)
    started: float = 0.0

    @property
    def model(self) -> str:
        return str(self.document.get("model") or "")

    @property
    def streams(self) -> bool:
        return self.document.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Whether the stream must end with the token usage."""
        options = self.document.get(STREAM_OPTIONS)
        return isinstance(options, dict) and options.get("include_usage") is True

    def wants(self, extension: str) -> bool:
        """Whether the client itself requested a field that the gateway may add, such as ``logprobs``."""
        return bool(self.document.get(extension))

    @property
    def parameters(self) -> JsonObject:
        """The sampling parameters of the request."""
        return recorded_parameters(self.settings)

    @property
    def sampling(self) -> SamplingParams:
        """The parameters with those that were filled in for it; none where a value is not valid."""
        added = added_fields(self, self.attempt.fields) if SAMPLING in self.attempt.fields else {}
        filled = {name: value for name, value in added.items() if name in SamplingParams.model_fields}
        try:
            return SamplingParams.model_validate(dict(sampling_in({**self.settings, **filled})))
        except (ValidationError, TypeError):
            return SamplingParams()

    def why_missing(self, name: str, *, lost_ids: bool) -> str:
        """Why the answer came without what the field ``name`` asks for."""
        if self.protocol is not CHAT:
            return f"POST /v1/{self.protocol.path} reports none"
        if self.document.get(name) is not None and not self.wants(name):
            return f"the client turned {name} off"
        if lost_ids and name == TOKEN_IDS:
            return "the stream left some token ids out"
        return self.attempt.why_missing(name)


def client_request(
    body: bytes, document: Json, messages: Any, tools: Any, settings: Json, **about: Any
) -> ClientRequest:
    """A request whose ``messages`` and ``tools`` are checked. Raises ``Unrecordable``, ``ValueError`` and others."""
    if not isinstance(messages, list) or not messages:
        raise Unrecordable("the request has no messages")
    if not all(isinstance(tool, dict) for tool in tools or ()):
        raise Unrecordable("a tool of the request is not an object")
    return ClientRequest(body, document, [*map(_recordable, messages)], tuple(tools or ()), settings, **about)


def _recordable(message: Json) -> WireMessage:
    """The message in the format of ``core.messages``. Raises ``ValueError`` and others for any other format."""
    content, calls = message.get("content"), message.get("tool_calls") or message.get("function_call")
    parts = content if isinstance(content, list) else [content]
    texts = (message.get("tool_call_id"), message.get("name"))
    if message["role"] not in _ROLES or not all(isinstance(part, dict | str | None) for part in parts):
        raise ValueError("a message has an unknown role or content")
    if not all(isinstance(text, str | None) for text in texts):
        raise ValueError("a message has a name or tool_call_id that is not a string")
    if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
        message = {**message, "tool_calls": wire_calls(calls_in(message))}
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    texts = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None,)
    return all(isinstance(text, str) for text in texts) and isinstance(call.get("id"), str | None)


def added_fields(call: ClientRequest, names: Sequence[str]) -> Json:
    """The fields of ``names`` with their values, for this request."""
    added: Json = extension_values(names, call.document)
    if SAMPLING in names:
        added |= {name: 1.0 for name in ("temperature", "top_p") if call.document.get(name) is None}
    if STREAM_OPTIONS in added:
        added[STREAM_OPTIONS] = {**(call.document.get(STREAM_OPTIONS) or {}), "include_usage": True}
    return added


def upstream_body(call: ClientRequest, model: str, added: Json) -> bytes:
    """The body for the model server: the client's own text, with the fields ``added``, and for ``model``."""
    if model != call.model or call.document.keys() & added.keys():
        return dump_object({**call.document, **added, "model": model})
    if not added:
        return call.body
    opening = call.body.index(b"{") + 1
    return b"".join((call.body[:opening], dump_object(added)[1:-1], b",", call.body[opening:]))


def put_back_calls(call: ClientRequest, calls: SampledCalls) -> None:
    """Send the ``calls`` of a chat completion's request as they were sampled."""
    messages = calls.put_back(call.messages)
    if all(one is other for one, other in zip(call.messages, messages, strict=True)):
        return
    # Those that stay are sent as they came: recorded messages have a system message for a developer's.
    sent = zip(call.document["messages"], call.messages, messages, strict=True)
    call.document["messages"] = [given if one is other else other for given, one, other in sent]
    call.body, call.messages = dump_object(call.document), messages


class AnswerStream:
    """A streamed answer, event by event, of which the client gets what it asked for.

    ``ending``: all has been said, and the client must not see the end before the answer is stored.
    ``done``: no event comes after this one.
    """

    def __init__(self, call: ClientRequest) -> None:
        self.problem = ""
        self.ending = self.done = False
        self._hidden = call.hidden

    def feed(self, received: ServerEvent) -> bytes:
        """Take an event; returns what the client gets of it."""
        if received.data == DONE:
            self.ending = self.done = True
        if received.data in (b"", DONE):
            return received.raw
        data = parse_object(received.data)
        try:
            if data is None or error_in(data) is not None:
                raise ValueError(f"an event of the stream is {'no JSON object' if data is None else 'an error'}")
            self.take(data)
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            self.problem = self.problem or str(problem) or "an event of the stream has an unknown format"
        shown = without(data, self._hidden)
        if shown == data:
            return received.raw
        return event(dump_object(shown)) if shown.get("choices") or shown.get("usage") else b""

    def whole(self) -> ChatAnswer:
        """The answer as a chat completion. Raises ``Unrecordable`` when the events are none, or not all."""
        if self.problem or not self.ending:
            raise Unrecordable(self.problem or "the stream ended before its answer did")
        return reading("the response", self.read)

    def take(self, data: Json) -> None:
        """Read an event. Raises ``ValueError`` and others for one of an unknown format."""
        raise NotImplementedError

    def read(self) -> ChatAnswer:
        """The response of all events. Raises ``Unrecordable``, and others as ``take``."""
        raise NotImplementedError


class ChunkStream(AnswerStream):
    """A streamed chat completion."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._hidden |= frozenset() if call.wants_usage else {"usage"}
        choices = call.document.get("n")
        self._choices = choices if isinstance(choices, int) else 1
        self._parts = ChunkAssembler()

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        self._parts.add(data)
        self.ending = self._parts.finished >= self._choices

    def read(self) -> ChatAnswer:
        """As ``AnswerStream.read``."""
        return ChatAnswer(self._parts.document(), lost_ids=self._parts.lost_ids)


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """One protocol. ``path`` is below ``/v1``; ``error_event`` is an error in a stream that has begun.

    ``request`` and ``response`` read JSON of the protocol, and may raise what ``AnswerStream.take`` does.
    """

    path: str
    request: Callable[[bytes, Json], ClientRequest]
    response: Callable[[bytes], ChatAnswer]
    stream: Callable[[ClientRequest], AnswerStream]
    error_event: Callable[[Json], bytes]

    def parse(self, body: bytes) -> ClientRequest:
        """A client's request. Raises ``Unrecordable``."""
        document = parse_object(body)
        if document is None:
            raise Unrecordable(f"the request is not a JSON object, or has more than {DEEPEST} levels")
        call = reading("the request", self.request, body, document)
        call.protocol = self
        return call

    def answer(self, body: bytes) -> ChatAnswer:
        """A whole response. Raises ``Unrecordable``."""
        return reading("the response", self.response, body)


def _request(body: bytes, document: Json) -> ClientRequest:
    wanted = [*(name for name in (TOKEN_IDS, LOGPROBS) if document.get(name) is None), SAMPLING]
    call = client_request(body, document, document.get("messages"), document.get("tools"), document)
    # Options that are no object are the server's to refuse.
    if call.streams and not call.wants_usage and isinstance(document.get(STREAM_OPTIONS), dict | None):
        wanted.append(STREAM_OPTIONS)
    hidden = (*(() if call.wants(TOKEN_IDS) else IDS), *(() if call.wants(LOGPROBS) else (LOGPROBS,)))
    call.wanted, call.hidden = tuple(wanted), frozenset(hidden)
    return call


def _error_event(error: Json) -> bytes:
    return event(dump_object({"error": error})) + event(DONE)


CHAT = WireProtocol("chat/completions", _request, chat_answer, ChunkStream, _error_event)
