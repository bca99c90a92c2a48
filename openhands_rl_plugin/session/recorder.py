"""Forwards requests for completions to the model server and records the answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import CaughtFailure, RLError, StorageError, boundary
from openhands_rl_plugin.core.messages import error_in
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import note_failure, read_body
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name
from openhands_rl_plugin.models.engines.chunks import EventStreamReader
from openhands_rl_plugin.models.engines.extensions import SAMPLING, Clock, ExtensionTable
from openhands_rl_plugin.session.client_sessions import OPENING, ClientSession, Exchange, SessionName
from openhands_rl_plugin.session.gateway_config import GatewayConfig
from openhands_rl_plugin.session.imitation import RESPONSES
from openhands_rl_plugin.session.model_server import ModelServer, RawHeaders, forwarded_headers
from openhands_rl_plugin.session.replies import EVENTS, JSON, ErrorReply, LiveAnswer, Reply, error_reply
from openhands_rl_plugin.session.searched import events_of
from openhands_rl_plugin.session.upstream import server_error
from openhands_rl_plugin.session.wire import (
    CHAT,
    AnswerStream,
    ClientRequest,
    Unrecordable,
    UpstreamResponse,
    WireProtocol,
    added_fields,
    dump_object,
    parse_object,
    upstream_body,
    with_sampled_calls,
    without,
)

LATEST = "latest"


_LOG = redacting_logger(__name__)

NOT_RECORDED = {"x-openhands-rl-recorded": "no"}
_BAD = "BadRequestError"
_MOST_RESPONSES = 65536
_EVENTS_AT_ONCE = 256
"""Events of one stream in one turn of the event loop."""


@dataclass
class Counts:
    """Counters of a gateway since its start.

    ``missing``: how many recorded answers lack token ids or logprobs, by cause. ``unrecorded_paths``: requests for
    completions in protocols that are not recorded. ``named_by``: requests by what named their session.
    ``restored_calls``: tool calls of requests that were put back as they were sampled.
    """

    recorded: int = 0
    unrecorded: int = 0
    upstream_errors: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    unrecorded_paths: Counter[str] = field(default_factory=Counter)
    named_by: Counter[str] = field(default_factory=Counter)
    restored_calls: int = 0


class Recorder:
    """Sends requests for completions to the model server and records the answers."""

    def __init__(self, config: GatewayConfig, upstream: ModelServer, clock: Clock = time.monotonic) -> None:
        self._upstream = upstream
        self._fills = config.sampling_defaults == "neutral"
        self._extensions = ExtensionTable(clock)
        # Response -> name of its session, for requests that go on from a response and name no session.
        self.sessions_of: OrderedDict[str, str] = OrderedDict()
        self._config = config
        self._adapters = AdapterStore(config.adapters_path)
        self._routed = frozenset((LATEST, check_name(config.adapter)) if config.adapter else ())
        self.counts = Counts()

    def refused(self) -> list[JsonObject]:
        """The fields that models refuse, for ``/health``."""
        return [
            {"model": each.model, "field": each.name, "status": each.status, "retry_in": round(each.retry_in)}
            for each in self._extensions.refused()
        ]

    async def ask(
        self,
        protocol: WireProtocol,
        session: ClientSession,
        call: ClientRequest,
        headers: RawHeaders,
        *,
        query: str,
        live: LiveAnswer,
    ) -> Reply:
        """The reply to a request; an error of the model server is forwarded unchanged.

        The events of a streamed answer go to ``live`` as they come, the last ones when the answer is stored. Then only
        the reply's status counts: an error came too late for the client to see it as one.
        """
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "gateway"):
                model = self._model(call.model)
                if session.is_searched:
                    if protocol is not CHAT:
                        return error_reply(400, "The strategy of this session answers chat completions.", _BAD)
                    return await self._decided(session, call, model, headers, live)
                if session.calls is not None and protocol is CHAT:
                    call, restored = with_sampled_calls(call, session.calls)
                    self.counts.restored_calls += restored
                wanted = [name for name in call.wanted if self._fills or name != SAMPLING]
                attempt = self._extensions.attempt(model, wanted)
                exchange = Exchange(protocol, session, call, attempt, time.perf_counter())
                async with self._answered(exchange, model, headers, query) as response:
                    if call.streams and response.headers.get("content-type", "").startswith(EVENTS):
                        return await self._stream(exchange, response, live)
                    return await self._whole(exchange, await self._upstream.whole(response))
        except RLError as error:
            self.counts.upstream_errors += isinstance(error, ErrorReply) or server_error(error) is not None
            return refusal(error)

    async def _decided(
        self, session: ClientSession, call: ClientRequest, model: str, headers: RawHeaders, live: LiveAnswer
    ) -> Reply:
        """What the session's strategy answers."""
        document = await session.decided(call, model, self._upstream.for_strategies(headers))
        self.counts.recorded += 1
        if not call.streams:
            return Reply(200, dump_object(document), recorded=True)
        for part in events_of(document, usage=call.wants_usage):
            live.add(part)
        return Reply(200, b"", EVENTS, recorded=True)

    def unrecorded(self, problem: Exception) -> None:
        """Count an answer that cannot be recorded."""
        known = isinstance(problem, Unrecordable)
        _LOG.warning("not recorded: %s", problem if known else f"it cannot be stored ({type(problem).__name__})")
        self.counts.unrecorded += 1

    def named(self, session: SessionName) -> None:
        """Count a request by what named its session; the first one that nothing named is logged."""
        if session.named_by == OPENING and not self.counts.named_by[OPENING]:
            _LOG.warning(
                "a conversation sends no id: those with the same first messages become one episode; "
                "give each a base_url of its own (/session/NAME/v1) or the header x-litellm-session-id"
            )
        self.counts.named_by[session.named_by] += 1

    def unrecorded_path(self, path: str) -> None:
        """Count a request in a protocol that is not recorded; the first one is logged."""
        if not self.counts.unrecorded_paths[path]:
            _LOG.warning("POST /v1/%s is passed on, but not recorded: use /v1/chat/completions", path)
        self.counts.unrecorded_paths[path] += 1

    @asynccontextmanager
    async def _answered(
        self, exchange: Exchange, model: str, headers: RawHeaders, query: str
    ) -> AsyncIterator[httpx.Response]:
        """The model server's answer to the request with the fields that it accepts. Raises ``ErrorReply``."""
        attempt, path = exchange.attempt, exchange.protocol.path + query
        while True:
            body = upstream_body(exchange.call, model, added_fields(exchange.call, attempt.fields))
            async with self._upstream.exchange("POST", path, headers, body, content_type=JSON.encode()) as response:
                if response.status_code == 200:
                    attempt.succeeded()
                    yield response
                    return
                refusal = await self._upstream.whole(response)
            if not attempt.is_refused(refusal.status, refusal.body):
                raise ErrorReply(refusal)

    async def _whole(self, exchange: Exchange, reply: Reply) -> Reply:
        call = exchange.call
        try:
            answer = await read_body(reply.body, exchange.protocol.answer)
        except Unrecordable as problem:
            shown, status = _unread(exchange, reply.body)
            if status:
                raise ErrorReply(replace(reply, status=status, body=shown)) from problem
            self.unrecorded(problem)
            return Reply(reply.status, shown, reply.content_type, {**reply.headers, **NOT_RECORDED})
        body = answer.body_for(call) if call.hidden else reply.body
        recorded = await self._record(exchange, lambda: answer)
        headers = reply.headers if recorded else {**reply.headers, **NOT_RECORDED}
        return Reply(200, body, reply.content_type, headers, recorded=recorded)

    async def _stream(self, exchange: Exchange, response: httpx.Response, live: LiveAnswer) -> Reply:
        live.headers = forwarded_headers(response.headers)
        reader, stream, held = EventStreamReader(), exchange.protocol.stream(exchange.call), []
        try:
            async for data in self._upstream.parts(response):
                for number, event in enumerate(reader.feed(data), 1):
                    if not number % _EVENTS_AT_ONCE:
                        await asyncio.sleep(0)
                    if not live.begun and (failed := _unread(exchange, event.data))[1]:
                        raise ErrorReply(Reply(failed[1], failed[0], headers=live.headers))
                    shown = stream.feed(event)
                    if stream.ending:
                        held.append(shown)
                    else:
                        live.add(shown)
                if stream.done:
                    break
        except httpx.HTTPError as error:
            message = f"The model server broke off its answer ({type(error).__name__}); ask again."
            raise ErrorReply(error_reply(502, message, "BadGatewayError")) from error
        recorded = await self._record(exchange, stream.whole, stream)
        for part in (*held, reader.rest()):
            live.add(part)
        return Reply(200, b"", EVENTS, live.headers, recorded=recorded)

    async def _record(
        self, exchange: Exchange, read: Callable[[], UpstreamResponse], stream: AnswerStream | None = None
    ) -> bool:
        """Store the answer, if it can be recorded. Raises ``StorageError``."""
        try:
            answer = read()
            missing = await exchange.session.record(exchange, answer, lost_ids=stream is not None and stream.lost_ids)
        except (Unrecordable, ValueError, TypeError, RecursionError) as error:
            # The answer is paid for.
            self.unrecorded(error)
            return False
        self.counts.recorded += 1
        self.counts.missing.update(missing)
        identity = answer.document.get("id")
        if identity and exchange.protocol is RESPONSES:
            self.sessions_of[str(identity)] = exchange.session.name
            if len(self.sessions_of) > _MOST_RESPONSES:
                self.sessions_of.popitem(last=False)
        return True

    def _model(self, asked: str) -> str:
        """The model for a request. Some names stand for the current version of the adapter, which a training loop
        updates; before the first, for the base model. Raises ``StorageError`` for a damaged pointer."""
        if asked not in self._routed:
            return asked
        current = self._adapters.current(self._config.adapter or "")
        return current.name if current is not None else self._config.base_model


def refusal(error: Exception) -> Reply:
    """The reply to a request that ended with this error."""
    match error:
        case ErrorReply():
            return error.reply
        case StorageError():
            # The client must not continue from an answer that is not stored; it can retry.
            _LOG.error("%s", error)
            return error_reply(503, str(error), "ServiceUnavailableError")
        case ValidationError():
            problem = error.errors(include_url=False, include_input=False)[0]
            return error_reply(400, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", _BAD)
        case CaughtFailure():
            if (known := server_error(error)) is None:
                return error_reply(500, note_failure(error.__cause__ or error), "InternalServerError")
            waits = {"retry-after": f"{known.retry_after:g}"} if known.retry_after else {}
            return error_reply(max(known.status, 400), str(known), "ModelServerError", waits)
    return error_reply(400, str(error), _BAD)


def _unread(exchange: Exchange, body: bytes) -> tuple[bytes, int]:
    """A body without what only the gateway asked for, and the status that an error in it stands for, or 0."""
    document, error = parse_object(body), None
    if document is not None:
        error = error_in(document)
        shown = without(document, exchange.call.hidden)
        if shown != document:
            body = dump_object(shown)
    return body, error[0] if error is not None else 0
