"""Sessions over HTTP: requests for completions go to the model server, and the answers are recorded."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import LIMITS
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, StorageError, boundary
from openhands_rl_plugin.core.messages import error_in, to_message
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HOST_EVIDENCE
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import listening, note_failure, read_body, serving_here
from openhands_rl_plugin.core.types import Bounded, FailureKind, JsonObject, Score, StopReason
from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name
from openhands_rl_plugin.models.engines.client import (
    Attempts,
    HttpUpstream,
    Response,
    ServerError,
    close_connections,
    events,
    server_error,
)
from openhands_rl_plugin.models.engines.openai_wire import (
    DEEPEST,
    DONE,
    Json,
    Unrecordable,
    dump_object,
    event,
    parse_object,
    reading,
    too_deep,
    without,
)
from openhands_rl_plugin.session.client_sessions import (
    OPENING,
    ClientSession,
    ErrorReply,
    GatewayConfig,
    OpenRequest,
    PendingCall,
    Reply,
    SessionPool,
    named_session,
    session_name,
)
from openhands_rl_plugin.session.wire import (
    CHAT,
    MESSAGES,
    RESPONSES,
    AnswerStream,
    ClientRequest,
    WireProtocol,
    put_back,
    upstream_body,
)

_LOG = redacting_logger(__name__)
JSON, EVENTS = "application/json", "text/event-stream"
NOT_RECORDED, _PLAIN = {"x-openhands-rl-recorded": "no"}, {"accept-encoding": "identity"}
KEEP_ALIVE, KEEP_ALIVE_SECONDS = b": keep-alive\n\n", 10.0  # a comment, which clients ignore
_SHUTDOWN_SECONDS, _MAX_SWEEP_SECONDS = 10, 60.0
_PROTOCOLS = {each.path: each for each in (CHAT, MESSAGES, RESPONSES)}
# Hop-by-hop headers, keys and cookies for the gateway, and those that the HTTP client sets itself.
_HOP_BY_HOP = "connection expect keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade"
_SET_HERE = "accept-encoding content-encoding content-length cookie host proxy-authorization"
_KEY_HEADERS = frozenset({"api-key", "authorization", "x-api-key", "x-goog-api-key"})
_OWN = _KEY_HEADERS.union(_HOP_BY_HOP.split(), _SET_HERE.split())
_NOT_PASSED_BACK = _OWN | {"date", "server"}


class EndRequest(BaseModel):
    """Body of ``/session/{session}/end``. ``success`` without ``reward`` is a reward of 1 or 0."""

    model_config = ConfigDict(extra="forbid")

    reward: Bounded | None = None
    success: bool | None = None
    evidence: Annotated[JsonObject, Field(default_factory=dict)]


class Incoming:
    """A request as uvicorn has it, with its whole body, and its response. ``path``: its parts, as they were sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        self.scope, self.body, self._send = scope, body, send
        self.path: list[str] = scope["raw_path"].decode("latin-1").split("/")[1:]
        query: str = scope["query_string"].decode("latin-1")
        self.query = f"?{query}" if query else ""
        self.headers = Headers(scope=scope)
        self.started = False
        # There is nothing to receive any more but the end of the connection.
        self.left = asyncio.ensure_future(receive())

    async def write(self, part: bytes, head: Reply | None = None, *, more: bool = True) -> None:
        """A part of the body; the first one brings the status and headers of ``head``. Without an end (``more=False``)
        the connection is cut."""
        if not self.started:
            self.started = True
            assert head is not None
            lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in head.headers.items()]
            await self._send({"type": "http.response.start", "status": head.status, "headers": lines})
        await self._send({"type": "http.response.body", "body": part, "more_body": more})


class Gateway:
    """The ASGI application."""

    def __init__(self, config: GatewayConfig, storage: TrajectoryStorage, settings: RLSettings | None = None) -> None:
        self._config = config
        self._storage = storage
        self._settings = settings or RLSettings.model_validate(LIMITS)
        serving = self._settings.serving
        if config.adapter and not serving.model:
            raise ConfigError("--adapter needs [rl.serving] model, the name of the model without an adapter")
        if self._settings.reward.gateway_min > self._settings.reward.gateway_max:
            raise ConfigError("[rl.reward] gateway_min is above gateway_max: no reward of a client could be stored")
        # The key of the server in the settings is not for another one.
        self._key = serving.api_key() or "" if serving.base_url in ("", config.upstream) else ""
        self._keeps_client_key = not self._key and not config.access().key
        self._upstream = HttpUpstream(config.upstream, self._key, config.timeout)
        self._adapters = AdapterStore(serving.adapters_directory)
        self._routed = ("latest", check_name(config.adapter)) if config.adapter else ()
        # Answers since the start, and how many recorded ones lack token ids or logprobs, by cause.
        self._counts, self._missing = Counter(recorded=0, unrecorded=0), Counter[str]()
        self._warned = False
        self.sessions = SessionPool(storage, config, self._settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; errors are in OpenAI's format."""
        request = Incoming(scope, receive, send, (await receive()).get("body", b""))
        try:
            reply = await self._replied(self._answer(request))
        finally:
            request.left.cancel()
        if reply is not None and not request.started:
            headers = {"content-type": JSON, **reply.headers, "content-length": str(len(reply.body))}
            await request.write(reply.body, replace(reply, headers=headers), more=False)

    async def _answer(self, request: Incoming) -> Reply | None:
        """The reply, or ``None`` when the response has begun."""
        scope, path, name = request.scope, request.path, ""
        if path[0] == "session" and len(path) > 3:
            name, path = unquote(path[1]), path[2:]
        match scope["method"], path:
            case "GET" | "HEAD", ["health"]:
                now = {"status": "ok", "sessions": len(self.sessions)}
                return Reply(200, dump_object({**now, **self._counts, "missing": self._missing}))
            case "POST", ["session"]:
                return await self._open(request.body)
            case "POST", ["session", name, "end"]:
                return await self._end(unquote(name), request.body)
            case method, [version, *rest] if rest and unquote(version) == "v1":
                sent = "/".join(rest)  # a part of it may contain %2F
                if method == "POST" and (protocol := _PROTOCOLS.get(unquote(sent))) is not None:
                    return await self._complete(request, protocol, name)
                return await self._pass(request, sent, {})
        raise ErrorReply(404, f"{scope['method']} {scope['path']}: Not Found")

    async def _open(self, body: bytes) -> Reply:
        """Open a session with a task, a strategy and limits."""
        opened = await read_body(body or b"{}", OpenRequest.model_validate_json)
        name = named_session(opened.session, {}) or uuid.uuid4().hex
        await self.sessions.open(name, opened)
        path = f"/session/{quote(name, safe='')}"
        return Reply(201, dump_object({"session": name, "path": f"{path}/v1", "end": f"{path}/end"}))

    async def _end(self, given: str, body: bytes) -> Reply:
        """End the episode; ``reward`` or ``success`` is stored as its score."""
        name = named_session(given, {})
        outcome = await read_body(body or b"{}", EndRequest.model_validate_json)
        if taken := sorted(HOST_EVIDENCE & outcome.evidence.keys()):
            raise ErrorReply(400, f"{', '.join(taken)}: rewards read these names, so that a client cannot write them")
        if too_deep(outcome.evidence):
            raise ErrorReply(400, f"evidence: has more than {DEEPEST} levels")
        reward, success = outcome.reward, outcome.success
        if reward is None and success is not None:
            reward = float(success)
        low, high = self._settings.reward.gateway_min, self._settings.reward.gateway_max
        if reward is not None and not low <= reward <= high:
            # One reward far above the others decides what is learnt, and anybody who may write here can send it.
            message = f"reward: has to be from {low:g} to {high:g}; see [rl.reward] gateway_min and gateway_max"
            raise ErrorReply(400, message)
        detail: JsonObject = {} if success is None else {"success": success}
        evidence = {**outcome.evidence, **detail, "ended_by": "client"}
        trajectory_id, ended = await self.sessions.end(name, StopReason.TERMINATED, evidence)
        if trajectory_id is None:
            raise ErrorReply(404, f"There is no completion in a session {name!r}.")
        if reward is not None:
            score = Score(trajectory_id=trajectory_id, reward=reward, detail=detail, reward_version="gateway")
            await self._storage.add_scores((score,))
        scored = {"ended": ended, "scored": reward is not None}
        return Reply(200, dump_object({"session": name, "trajectory_id": trajectory_id, **scored}))

    async def _pass(self, request: Incoming, path: str, marks: Mapping[str, str]) -> None:
        """Forward a request unchanged and unrecorded."""
        if ".." in re.split(r"[/\\]", unquote(path)):
            raise ErrorReply(400, "The path must not contain '..'.")
        sent_on = request.scope["method"], path + request.query, self._headers(request), request.body
        async with self._upstream.open(*sent_on) as answer:
            head = Reply(answer.status, b"", {**_passed_back(answer.headers), **marks})
            async for part in answer.content.iter_any():
                if request.left.done():
                    return
                await request.write(part, head)
            await request.write(b"", head, more=False)

    def _headers(self, request: Incoming) -> dict[str, str]:
        """Those for the model server; a client's keys are for the gateway where that has one."""
        own = _OWN - _KEY_HEADERS if self._keeps_client_key else _OWN
        given = request.headers  # some clients send a name several times, such as anthropic-beta
        return {name: ", ".join(given.getlist(name)) for name in given if name not in own} | _PLAIN

    async def _complete(self, request: Incoming, protocol: WireProtocol, name: str) -> Reply | None:
        """A completion in one of the protocols that are recorded."""
        try:
            call = await read_body(request.body, protocol.parse)
        except Unrecordable as problem:
            self._unrecorded(problem)
            return await self._pass(request, protocol.path, NOT_RECORDED)
        client = (request.scope.get("client") or ("",))[0]
        named = session_name(name, client, request.headers, call.document, call.messages)
        if named.startswith(OPENING) and not self._warned:
            self._warned = True
            _LOG.warning(
                "a conversation sends no id: those with the same first messages become one episode; "
                "give each a base_url of its own (/session/NAME/v1) or the header x-litellm-session-id"
            )
        session = await self.sessions.open(named)
        ask = partial(self._completion, request, session, call)
        pending = session.join(protocol.path, request.body, request.headers, request.left, ask)
        # Until the first event, and in long pauses, comments; before JSON that a strategy decides, white space.
        silence = KEEP_ALIVE_SECONDS if call.streams or session.is_searched else None
        head = {"content-type": EVENTS, "cache-control": "no-cache"} if call.streams else {"content-type": JSON}
        async for part in pending.parts(silence, KEEP_ALIVE if call.streams else b" "):
            await request.write(part, Reply(200, b"", {**pending.headers, **head}))
        reply, here = await self._replied(pending.task), not request.left.done()
        if not request.started:
            pending.delivered |= here
            return reply
        last = reply.body if reply.status == 200 and not call.streams else b""
        if call.streams and (reply.status != 200 or not pending.begun):
            last = _late(reply, protocol)
        await request.write(last)
        # Else the connection is cut: not the end of a complete answer, also for a client that overlooks the error.
        if reply.status == 200 or (call.streams and not pending.begun):
            pending.delivered |= here
            await request.write(b"", more=False)
        return None

    async def _replied[T](self, work: Awaitable[T]) -> T | Reply:
        """The result, or the reply that its error stands for."""
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "gateway"):
                return await work
        except RLError as error:
            return refusal(error)

    async def _completion(
        self, request: Incoming, session: ClientSession, call: ClientRequest, to: PendingCall
    ) -> Reply:
        """The reply to a request. Raises ``ServerError`` and others.

        The events of a streamed answer go ``to`` its clients as they come, the last ones when the answer is stored.
        """
        model, config, headers = self._model(call.model), self._config, self._headers(request)
        if session.exact:  # its messages are compared with those of the tree
            reading("the request", list, map(to_message, call.messages))
        if session.is_searched:
            if call.protocol is not CHAT:
                raise ErrorReply(400, "The strategy of this session answers chat completions.")
            keys = {name: value for name, value in headers.items() if name in _KEY_HEADERS}
            upstream = HttpUpstream(config.upstream, self._key, config.timeout, headers=keys)
            document = await session.decided(call, model, upstream)
            self._counts["recorded"] += 1
            if call.streams:
                to.add(_as_events(document, usage=call.wants_usage))
            return Reply(200, dump_object(document), recorded=True)
        if session.exact and call.protocol is CHAT:
            put_back(call, session.as_sampled(call.messages))
        call.attempts, call.started = Attempts(self._upstream), time.perf_counter()

        async def send() -> Reply:
            path, body = call.protocol.path + request.query, upstream_body(call, model)
            async with self._upstream.open("POST", path, headers, body) as response:
                return await self._recorded(session, call, response, to)

        return await call.attempts.answered(send)

    async def _recorded(
        self, session: ClientSession, call: ClientRequest, response: Response, to: PendingCall
    ) -> Reply:
        """The server's answer, passed on as it comes and stored, if it can be. Raises ``StorageError``."""
        headers, stream, held, body = _passed_back(response.headers), None, list[bytes](), b""
        if call.streams and response.headers.get("content-type", "").startswith(EVENTS):
            to.headers, stream = headers, call.protocol.stream(call)
            held = await _streamed(stream, response, to)
        else:
            body = await response.read()
        try:
            answer = stream.whole() if stream is not None else await read_body(body, call.protocol.answer)
            missing = await session.record(call, answer)
        except (Unrecordable, ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
            # The answer has used the server's time.
            if (found := error_in(parse_object(body))) is not None:
                raise ServerError(found[0], str(problem), body, response.headers) from problem
            self._unrecorded(problem)
            reply = Reply(response.status, body, {**headers, **NOT_RECORDED})
        else:
            self._counts["recorded"] += 1
            self._missing.update(missing)
            if stream is None and call.hidden:
                body = dump_object(without(answer.document, call.hidden))
            reply = Reply(200, body, headers, recorded=True)
        for part in held:
            to.add(part)
        return reply

    def _unrecorded(self, problem: Exception) -> None:
        known = isinstance(problem, Unrecordable)
        _LOG.warning("not recorded: %s", problem if known else f"it cannot be stored ({type(problem).__name__})")
        self._counts["unrecorded"] += 1

    def _model(self, name: str) -> str:
        """The model for a request. Some names stand for the current version of the adapter, which a training loop
        updates; before the first, for the base model. Raises ``StorageError`` for a damaged pointer."""
        if name not in self._routed:
            return name
        current = self._adapters.current(self._config.adapter or "")
        return current.name if current is not None else self._settings.serving.model


def refusal(error: RLError) -> Reply:
    """The reply to a request that ended with this error, in a format that clients of OpenAI and of Anthropic read; an
    error of the model server as it came."""
    known, cause, status, message = server_error(error), error.__cause__, 400, str(error)
    if known is not None and known.headers is not None and known.status != 200:
        return Reply(known.status, known.body, _passed_back(known.headers))
    if known is not None:
        status, message = 504 if known.status == 408 else 502, str(known)
    elif isinstance(cause, ValidationError):
        problem = cause.errors(include_url=False, include_input=False)[0]
        message = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    elif isinstance(cause, Unrecordable):
        message = str(cause)
    elif isinstance(error, CaughtFailure):
        status, message = 500, note_failure(cause or error)
    elif isinstance(error, StorageError):
        # The client must not continue from an answer that is not stored; it can retry.
        _LOG.error("%s", error)
        status = 503
    elif isinstance(error, ErrorReply):
        status = error.status
    kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    body = {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": status}}
    return Reply(status, dump_object(body))


def _passed_back(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a response that are forwarded to the client, such as ``retry-after``."""
    return {name.lower(): value for name, value in headers.items() if name.lower() not in _NOT_PASSED_BACK}


async def _streamed(stream: AnswerStream, response: Response, to: PendingCall) -> list[bytes]:
    """Pass the events on; returns the last ones, which wait until the answer is stored."""
    held = list[bytes]()
    async for received in events(response):
        if not to.begun and (found := error_in(parse_object(received.data))) is not None:
            headers = {**to.headers, "content-type": JSON}
            raise ServerError(found[0], "an error in a stream", received.data, headers)
        shown = stream.feed(received)
        if stream.ending:
            held.append(shown)
        else:
            to.add(shown)
        if stream.done:
            break
    return held


def _late(reply: Reply, protocol: WireProtocol) -> bytes:
    """A reply without events, for a client whose stream has already started."""
    if reply.status == 200:
        return event(b"".join(reply.body.splitlines()))
    error = (parse_object(reply.body) or {}).get("error")
    known = error if isinstance(error, dict) else {"message": reply.body[:2000].decode("utf-8", "replace")}
    return protocol.error_event(known)


def _as_events(document: Json, *, usage: bool) -> bytes:
    """A chat completion as a stream would have brought it, in one part."""
    frame = {name: document.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choices = []
    for choice in document["choices"]:
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        choices.append({"index": 0, "delta": message, "finish_reason": choice.get("finish_reason")})
    chunks = [{**frame, "choices": choices}]
    if usage:
        chunks.append({**frame, "choices": [], "usage": document.get("usage")})
    return b"".join(event(dump_object(chunk)) for chunk in chunks) + event(DONE)


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, storage: TrajectoryStorage, settings: RLSettings | None = None
) -> AsyncIterator[str]:
    """A gateway in this event loop; yields its URL, without ``/v1``. All sessions are ended on exit.

    ``settings``: what a session of ``POST /session`` leaves open.

    Raises ``PortUnavailableError``, and ``StorageError`` when the storage cannot be read or written. The storage stays
    open.
    """
    gateway = Gateway(config, storage, settings)
    with listening(config.host, config.port) as listener:
        await gateway.sessions.start()
        sweeper = asyncio.create_task(_sweep(gateway.sessions, min(60 * config.idle_minutes / 4, _MAX_SWEEP_SECONDS)))
        try:
            async with serving_here(
                gateway,
                listener,
                access=config.access(),
                max_body_bytes=config.max_body_bytes,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            ) as url:
                yield url
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await gateway.sessions.close(_SHUTDOWN_SECONDS)
            await close_connections()


async def _sweep(sessions: SessionPool, pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        try:
            await sessions.end_idle()
        except StorageError as error:
            # They stay open until the next attempt; requests in the meantime get the error.
            _LOG.error("idle sessions could not be ended: %s", error)
