"""Runs a gateway: its HTTP routes and its life."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.work import LIMITS
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HOST_EVIDENCE
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import HEALTH, Receive, Scope, Send, listening, read_body, serving_here
from openhands_rl_plugin.core.types import Bounded, JsonObject, Score, StopReason
from openhands_rl_plugin.models.engines.extensions import Clock
from openhands_rl_plugin.session.client_sessions import (
    ClientSession,
    SessionName,
    SessionPool,
    named_session,
    session_name,
)
from openhands_rl_plugin.session.gateway_config import GatewayConfig
from openhands_rl_plugin.session.imitation import MESSAGES, RESPONSES
from openhands_rl_plugin.session.model_server import ModelServer, RawHeaders, forwarded_headers
from openhands_rl_plugin.session.recorder import NOT_RECORDED, Recorder, refusal
from openhands_rl_plugin.session.replies import EVENTS, JSON, ErrorReply, PendingCall, Reply, error_reply
from openhands_rl_plugin.session.searched import OpenRequest, opened_session
from openhands_rl_plugin.session.wire import (
    CHAT,
    DEEPEST,
    Unrecordable,
    WireProtocol,
    dump_object,
    event,
    parse_object,
    too_deep,
)

_REWARD_VERSION = "gateway"
_LONGEST_ERROR = 2000
# Paths of completions that are passed on, but have no place in an episode.
_UNRECORDED = frozenset({"completions", "messages/batches", "responses/compact", "batches"})
_PROTOCOLS = {each.path: each for each in (CHAT, MESSAGES, RESPONSES)}
_LONGEST_PATH = 200
_SEPARATOR = re.compile(r"[/\\]")


class EndRequest(BaseModel):
    """Body of ``/session/{session}/end``. ``success`` without ``reward`` is a reward of 1 or 0."""

    model_config = ConfigDict(extra="forbid")

    reward: Bounded | None = None
    success: bool | None = None
    evidence: Annotated[JsonObject, Field(default_factory=dict)]

    @field_validator("evidence")
    @classmethod
    def _of_a_client(cls, evidence: JsonObject) -> JsonObject:
        if taken := sorted(HOST_EVIDENCE & evidence.keys()):
            raise ValueError(f"{', '.join(taken)}: rewards read these names, so that a client cannot write them")
        return evidence

    @property
    def told(self) -> float | None:
        """The reward, ``None`` when the request tells none."""
        return self.reward if self.reward is not None or self.success is None else float(self.success)


class Incoming:
    """A request as uvicorn has it, with its whole body, and its response. ``path``: its parts, as they were sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        self.method: str = scope["method"]
        self.path: list[str] = scope["raw_path"].decode("latin-1").split("/")[1:]
        query: str = scope["query_string"].decode("latin-1")
        self.query = f"?{query}" if query else ""
        self.raw_headers: RawHeaders = scope["headers"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.client = (scope.get("client") or ("",))[0]
        self.body = body
        self.started = False
        self._scope = scope
        self._send = send
        # There is nothing to receive any more but the end of the connection.
        self._left = asyncio.ensure_future(receive())

    @property
    def connected(self) -> bool:
        """Whether the client still waits."""
        return not self._left.done()

    def route(self, name: str) -> None:
        """Count the request under this name."""
        self._scope["rl_route"] = name

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin the response."""
        self.started = True
        lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def write(self, part: bytes, *, more: bool = True) -> None:
        """A part of the body; without an end (``more=False``) the connection is cut."""
        await self._send({"type": "http.response.body", "body": part, "more_body": more})

    async def reply(self, reply: Reply) -> None:
        """Send a complete response."""
        length = str(len(reply.body))
        await self.start(reply.status, {**reply.headers, "content-type": reply.content_type, "content-length": length})
        await self.write(reply.body, more=False)

    def close(self) -> None:
        """Watch the connection no longer."""
        self._left.cancel()


class Gateway:
    """The ASGI application. Its requests share one recorder and one pool of sessions."""

    def __init__(
        self,
        config: GatewayConfig,
        storage: TrajectoryStorage,
        clock: Clock = time.monotonic,
        settings: RLSettings | None = None,
    ) -> None:
        self._config = config
        self._settings = settings or RLSettings.model_validate(LIMITS)
        self._storage = storage
        self._upstream = ModelServer(config)
        self.aclose = self._upstream.aclose
        self._recorder = Recorder(config, self._upstream, clock)
        self.sessions = SessionPool(
            storage,
            lambda request: ClientSession(
                storage, request, self._settings, config.base_model, restores=config.restore_calls
            ),
            run_id=config.run_id,
            idle=60 * config.idle_minutes,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; errors are in OpenAI's format."""
        request = Incoming(scope, receive, send, (await receive()).get("body", b""))
        try:
            reply = await self._answer(request)
        except (ErrorReply, StorageError, ConfigError, ValidationError) as error:
            reply = refusal(error)
        finally:
            request.close()
        if reply is not None and not request.started:
            await request.reply(reply)

    async def _answer(self, request: Incoming) -> Reply | None:
        """The reply, or ``None`` when the response has begun."""
        match request.method, request.path:
            case "GET" | "HEAD", ["health"]:
                request.route(HEALTH)
                return self._health()
            case "POST", ["session"]:
                request.route("/session")
                answer = self._open(request.body)
            case "POST", ["session", name, "end"]:
                request.route("/session/{session}/end")
                answer = self._end(unquote(name), request.body)
            case _, ["session", name, version, *rest] if rest and unquote(version) == "v1":
                answer = self._forwarded(request, unquote(name), "/".join(rest))
            case _, [version, *rest] if rest and unquote(version) == "v1":
                answer = self._forwarded(request, "", "/".join(rest))
            case _:
                path = "/".join(request.path)[:_LONGEST_PATH]
                return error_reply(404, f"{request.method} /{path}: Not Found", "NotFoundError")
        return await answer

    def _health(self) -> Reply:
        """Counters since the start, and the fields that models refuse."""
        now = {"status": "ok", "sessions": len(self.sessions)}
        told = {**now, **vars(self._recorder.counts), "refused": self._recorder.refused()}
        return Reply(200, dump_object(told))

    async def _forwarded(self, request: Incoming, name: str, sent: str) -> Reply | None:
        """Any request below ``/v1``. ``sent``: the path as it was sent; a part of it may contain ``%2F``."""
        path, prefix = unquote(sent), "/session/{session}" if name else ""
        protocol = _PROTOCOLS.get(path) if request.method == "POST" else None
        request.route(f"{prefix}/v1/{path if protocol is not None else '{path}'}")
        if protocol is not None:
            return await self._complete(request, protocol, name)
        if request.method != "POST" or path not in _UNRECORDED:
            return await self._pass(request, sent, {})
        self._recorder.unrecorded_path(path)
        if known := named_session(name, request.headers):
            (await self.sessions.open(known)).unrecorded[path] += 1
        return await self._pass(request, sent, NOT_RECORDED)

    async def _complete(self, request: Incoming, protocol: WireProtocol, name: str) -> Reply | None:
        """A completion in one of the protocols that are recorded."""
        try:
            call = await read_body(request.body, protocol.parse)
        except Unrecordable as problem:
            self._recorder.unrecorded(problem)
            return await self._pass(request, protocol.path, NOT_RECORDED)
        named = session_name(name, request.client, request.headers, call.document, call.messages)
        if not name and call.continues and (known := self._recorder.sessions_of.get(call.continues)):
            named = SessionName(known, "response")
        self._recorder.named(named)
        session = await self.sessions.open(named.name)
        call_in_flight = session.pending.join(
            protocol.path,
            request.body,
            request.headers,
            lambda: request.connected,
            lambda live: self._recorder.ask(
                protocol, session, call, request.raw_headers, query=request.query, live=live
            ),
        )
        if call.streams:
            return await self._stream(request, call_in_flight, protocol)
        if session.is_searched:
            await self._fill(request, call_in_flight.task)
        reply = await asyncio.shield(call_in_flight.task)
        call_in_flight.delivered |= request.connected
        if request.started and reply.status == 200:
            await request.write(reply.body, more=False)
        return reply

    async def _fill(self, request: Incoming, task: asyncio.Task[Reply]) -> None:
        """White space while a strategy decides, which JSON may begin with: clients give up after some silence."""
        while not (await asyncio.wait([task], timeout=self._config.keep_alive))[0] and request.connected:
            if not request.started:
                await request.start(200, {"content-type": JSON})
            await request.write(b" ")

    async def _pass(self, request: Incoming, path: str, marks: Mapping[str, str]) -> Reply | None:
        """Forward a request unchanged and unrecorded."""
        if ".." in _SEPARATOR.split(unquote(path)):
            return error_reply(400, "The path must not contain '..'.", "BadRequestError")
        target = path + request.query
        async with self._upstream.exchange(request.method, target, request.raw_headers, request.body) as answer:
            headers = {**forwarded_headers(answer.headers), **marks}
            if "content-type" in answer.headers:
                headers["content-type"] = answer.headers["content-type"]
            await request.start(answer.status_code, headers)
            async for part in answer.aiter_bytes():
                if not request.connected:
                    return None
                await request.write(part)
            await request.write(b"", more=False)
        return None

    async def _stream(self, request: Incoming, call_in_flight: PendingCall, protocol: WireProtocol) -> Reply | None:
        """The events as they come. Until the first, and in long pauses, keep-alive comments; they fix status 200."""
        live, task, silence = call_in_flight.live, call_in_flight.task, self._config.keep_alive
        if await live.wait(task, silence) and not live.begun:
            call_in_flight.delivered |= request.connected
            return task.result()
        await request.start(200, {**live.headers, "content-type": EVENTS, "cache-control": "no-cache"})
        async for part in live.parts(task, silence):
            if request.connected:
                await request.write(part)
        # A client that left receives the answer when it retries.
        reply = task.result()
        if reply.status != 200 or not live.begun:
            await request.write(_late(reply, protocol))
        if reply.status == 200 or not live.begun:
            call_in_flight.delivered |= request.connected
            await request.write(b"", more=False)
        # Else the connection is cut: not the end of a complete answer, also for a client that overlooks the error.
        return None

    async def _open(self, body: bytes) -> Reply:
        """Open a session with a task, a strategy and limits."""
        base_model, restores = self._config.base_model, self._config.restore_calls
        opened = await read_body(body or b"{}", OpenRequest.model_validate_json)
        name = named_session(opened.session, {}) or uuid.uuid4().hex
        await self.sessions.create(
            name,
            lambda request: opened_session(
                self._storage, request, opened, self._settings, base_model, restores=restores
            ),
        )
        path = f"/session/{quote(name, safe='')}"
        return Reply(201, dump_object({"session": name, "path": f"{path}/v1", "end": f"{path}/end"}))

    async def _end(self, given: str, body: bytes) -> Reply:
        """End the episode; ``reward`` or ``success`` is stored as its score."""
        name = named_session(given, {})
        outcome = await read_body(body or b"{}", EndRequest.model_validate_json)
        if too_deep(outcome.evidence):
            return error_reply(400, f"evidence: has more than {DEEPEST} levels", "BadRequestError")
        low, high = self._config.reward_min, self._config.reward_max
        if (reward := outcome.told) is not None and not low <= reward <= high:
            # One reward far above the others decides what is learnt, and anybody who may write here can tell it.
            message = f"reward: has to be from {low:g} to {high:g}; raise --reward-min or --reward-max of the gateway"
            return error_reply(400, message, "BadRequestError")
        detail: JsonObject = {} if outcome.success is None else {"success": outcome.success}
        evidence = {**outcome.evidence, **detail, "ended_by": "client"}
        trajectory_id, ended = await self.sessions.end(name, StopReason.TERMINATED, evidence)
        if trajectory_id is None:
            return error_reply(404, f"There is no completion in a session {name!r}.", "NotFoundError")
        if reward is not None:
            score = Score(trajectory_id=trajectory_id, reward=reward, detail=detail, reward_version=_REWARD_VERSION)
            await self._storage.add_scores((score,))
        scored = {"ended": ended, "scored": reward is not None}
        return Reply(200, dump_object({"session": name, "trajectory_id": trajectory_id, **scored}))


def _late(reply: Reply, protocol: WireProtocol) -> bytes:
    """A reply without events, for a client whose stream has already started."""
    if reply.status == 200:
        return event(b"".join(reply.body.splitlines()))
    error = (parse_object(reply.body) or {}).get("error")
    known = error if isinstance(error, dict) else {"message": reply.body[:_LONGEST_ERROR].decode("utf-8", "replace")}
    return protocol.error_event(known)


_LOG = redacting_logger(__name__)
_SHUTDOWN_SECONDS = 10
_MAX_SWEEP_SECONDS = 60.0


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, storage: TrajectoryStorage, clock: Clock = time.monotonic, settings: RLSettings | None = None
) -> AsyncIterator[str]:
    """A gateway in this event loop; yields its URL, without ``/v1``. All sessions are ended on exit.

    ``clock``: seconds, for when a field that a model refused is tried again. ``settings``: what a session of
    ``POST /session`` leaves open.

    Raises ``PortUnavailableError``, and ``StorageError`` when the storage cannot be read or written. The storage stays
    open.
    """
    gateway = Gateway(config, storage, clock, settings)
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
            await gateway.aclose()


async def _sweep(sessions: SessionPool, pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        try:
            await sessions.end_idle()
        except StorageError as error:
            # They stay open until the next attempt; requests in the meantime get the error.
            _LOG.error("idle sessions could not be ended: %s", error)
