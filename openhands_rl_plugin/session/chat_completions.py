"""OpenAI's chat completions, the protocol in which vLLM and others report token ids."""

from __future__ import annotations

from openhands_rl_plugin.core.messages import error_in
from openhands_rl_plugin.models.engines.chunks import ChunkAssembler, ServerEvent
from openhands_rl_plugin.models.engines.extensions import LOGPROBS, SAMPLING, TOKEN_IDS, extension_values
from openhands_rl_plugin.models.engines.openai_wire import DONE
from openhands_rl_plugin.session.protocol import AnswerStream, WireProtocol, event, marked
from openhands_rl_plugin.session.requests import ClientRequest, client_request, parsed_body
from openhands_rl_plugin.session.responses import UpstreamResponse, asked_for, fields_not_asked_for, without_fields
from openhands_rl_plugin.session.token_id_text import Json, dump_object, parse_object

STREAM_OPTIONS = "stream_options"


def added_fields(call: ClientRequest, names: tuple[str, ...]) -> Json:
    """The fields of ``names`` with their values, for this request."""
    added: Json = extension_values(names, call.document)
    if SAMPLING in names:
        added |= {name: 1.0 for name in ("temperature", "top_p") if call.document.get(name) is None}
    if STREAM_OPTIONS in added:
        added[STREAM_OPTIONS] = {**(call.document.get(STREAM_OPTIONS) or {}), "include_usage": True}
    return added


class ChunkStream(AnswerStream):
    """A streamed chat completion, from which the client gets what it asked for."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._call = call
        self._hidden = fields_not_asked_for(call)
        choices = call.document.get("n")
        self._choices = choices if isinstance(choices, int) else 1
        self._parts = ChunkAssembler()

    def feed(self, received: ServerEvent) -> bytes:
        """Take an event; returns it without token ids, logprobs and usage that only the gateway asked for."""
        if not received.data:
            return received.raw
        if received.data == DONE:
            self.ending = self.done = True
            return received.raw
        chunk = parse_object(received.data)
        try:
            if chunk is None or error_in(chunk) is not None:
                raise ValueError(
                    "an event of the stream is an error" if chunk else "an event of the stream is no JSON object"
                )
            self._parts.add(chunk)
        except ValueError as problem:
            self.problem = self.problem or str(problem)
            if chunk is None and any(name.encode() in received.data for name in self._hidden):
                return _error_event({"message": str(problem), "type": "BadGatewayError", "code": 502})
            shown = without_fields(chunk, self._hidden)
            kept = chunk is None or shown == chunk
            return marked(received if kept else received._replace(raw=event(dump_object(shown))))
        self.ending = self._parts.finished >= self._choices
        return self._for_client(received.raw, chunk)

    def read(self) -> UpstreamResponse:
        """As ``AnswerStream.read``."""
        self.lost_ids = self._parts.lost_ids
        return UpstreamResponse(dump_object(self._parts.document()))

    def _for_client(self, raw: bytes, chunk: Json) -> bytes:
        shown = asked_for(chunk, self._call)
        if not self._call.wants_usage and shown.get("usage") is not None:
            shown = {name: value for name, value in shown.items() if name != "usage"}
            if not shown.get("choices"):
                return b""
        if shown == chunk:
            return raw
        told, left = (all(map(_says_nothing, each.get("choices") or ())) for each in (chunk, shown))
        if left and not told:
            return b""
        return event(dump_object(shown))


def _says_nothing(choice: Json) -> bool:
    """Whether a chunk's choice has been there for its token ids and logprobs only."""
    said = {**choice, **(choice.get("delta") or {})}
    return not any(value for name, value in said.items() if name not in ("index", "delta"))


def _wanted(call: ClientRequest) -> list[str]:
    """The fields that the client's request leaves open."""
    wanted = [name for name in (TOKEN_IDS, LOGPROBS) if call.document.get(name) is None] + [SAMPLING]
    # Options that are no object are the server's to refuse.
    open_options = isinstance(call.document.get(STREAM_OPTIONS), dict | None)
    return [*wanted, STREAM_OPTIONS] if call.streams and open_options and not call.wants_usage else wanted


def _parse(body: bytes) -> ClientRequest:
    document = parsed_body(body)
    return client_request(body, document, document.get("messages"), document.get("tools"), document)


def _error_event(error: Json) -> bytes:
    return event(dump_object({"error": error})) + event(DONE)


CHAT = WireProtocol(
    path="chat/completions",
    reports_ids=True,
    wanted=_wanted,
    request=_parse,
    response=UpstreamResponse,
    stream=ChunkStream,
    error_event=_error_event,
)
