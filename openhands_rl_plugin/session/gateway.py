"""Runs a gateway: its HTTP routes and its life."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HOST_EVIDENCE
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import (
    BACKLOG,
    HEALTH,
    IDLE_SECONDS,
    METRICS,
    RequestMetrics,
    listening,
    read_body,
    url_of,
)
from openhands_rl_plugin.core.types import Bounded, JsonObject, Score, StopReason
from openhands_rl_plugin.models.engines.extensions import Clock
from openhands_rl_plugin.session.chat_completions import CHAT
from openhands_rl_plugin.session.client_sessions import SessionName, SessionPool, named_session, session_name
from openhands_rl_plugin.session.gateway_config import GatewayConfig
from openhands_rl_plugin.session.guard import RequestGuard, library_logger, response_of
from openhands_rl_plugin.session.messages_api import MESSAGES
from openhands_rl_plugin.session.model_server import ModelServer, forwarded_headers
from openhands_rl_plugin.session.protocol import WireProtocol, event
from openhands_rl_plugin.session.recorder import NOT_RECORDED, Recorder
from openhands_rl_plugin.session.replies import EVENTS, PendingCall, Reply, error_reply
from openhands_rl_plugin.session.requests import ClientRequest, Unrecordable
from openhands_rl_plugin.session.responses_api import RESPONSES
from openhands_rl_plugin.session.token_id_text import DEEPEST, dump_object, parse_object, too_deep

_REWARD_VERSION = "gateway"
_LONGEST_ERROR = 2000
# Paths of completions that are passed on, but have no place in an episode.
_UNRECORDED = frozenset({"completions", "messages/batches", "responses/compact", "batches"})
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


class Gateway:
    """Request handlers of the gateway; they share one recorder and one pool of sessions."""

    def __init__(
        self,
        config: GatewayConfig,
        storage: TrajectoryStorage,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._storage = storage
        self._upstream = ModelServer(config)
        self._recorder = Recorder(config, self._upstream, clock)
        self._left: set[asyncio.Task[Reply]] = set()
        self.metrics = RequestMetrics()
        self._guard = RequestGuard(config, self.metrics, lambda: len(self._left))
        self.sessions = SessionPool(
            storage,
            run_id=config.run_id,
            base_model=config.base_model,
            max_sessions=config.max_sessions,
            max_open=config.max_open_sessions,
            idle=60 * config.idle_minutes,
        )

    def app(self) -> web.Application:
        """The application with its routes, API key check and limits."""
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=self._guard.middlewares)
        app.router.add_get(HEALTH, self.health)
        app.router.add_get(METRICS, self.measured)
        for prefix in ("", "/session/{session}"):
            for protocol in (CHAT, MESSAGES, RESPONSES):
                app.router.add_post(f"{prefix}/v1/{protocol.path}", partial(self.complete, protocol))
            app.router.add_route("*", f"{prefix}/v1/{{path:.+}}", self.pass_through)
        app.router.add_post("/session/{session}/end", self.end)
        return app

    async def aclose(self) -> None:
        """Close the connections to the model server."""
        await self._upstream.aclose()

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: counters since the start, and the fields that models refuse."""
        now = {"status": "ok", "sessions": len(self.sessions), "in_flight": self._guard.busy}
        told = {**now, **self._recorder.counts.told(), "refused": self._recorder.refused()}
        return response_of(Reply(200, dump_object(told)))

    async def measured(self, request: web.Request) -> web.Response:
        """GET /metrics: Prometheus' text format."""
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    async def complete(self, protocol: WireProtocol, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions, /v1/messages and /v1/responses."""
        body = await request.read()
        try:
            call = await read_body(body, protocol.parse)
        except Unrecordable as problem:
            self._recorder.unrecorded(problem)
            return await self._forward(request, protocol.path, body, NOT_RECORDED)
        named = self._session_name(request, call)
        self._recorder.named(named)
        session = await self.sessions.open(named.name)
        headers, query = request.headers.copy(), _query(request)
        call_in_flight = session.pending.join(
            protocol.path,
            body,
            headers,
            lambda: _connected(request),
            lambda live: self._recorder.ask(protocol, session, call, headers, query=query, live=live),
        )
        try:
            if call.streams:
                return await self._stream(request, call_in_flight, protocol)
            reply = await asyncio.shield(call_in_flight.task)
            call_in_flight.delivered |= _connected(request)
            return response_of(reply)
        finally:
            if not call_in_flight.task.done():
                # The client left; the model server works on.
                self._left.add(call_in_flight.task)
                call_in_flight.task.add_done_callback(self._left.discard)

    def _session_name(self, request: web.Request, call: ClientRequest) -> SessionName:
        in_path = request.match_info.get("session", "")
        if not in_path and call.continues and (known := self._recorder.session_of(call.continues)):
            return SessionName(known, "response")
        return session_name(in_path, request.remote or "", request.headers, call.document, call.messages)

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """Any other path below /v1: forwarded unchanged and not recorded."""
        # As it was sent, behind ``/v1/`` or ``/session/NAME/v1/``: a part of it may contain ``%2F``.
        sent = request.rel_url.raw_path.split("/", 4 if "session" in request.match_info else 2)[-1]
        path = unquote(sent)
        if request.method != "POST" or path not in _UNRECORDED:
            return await self._forward(request, sent, await request.read(), {})
        self._recorder.unrecorded_path(path)
        if name := named_session(request.match_info.get("session", ""), request.headers):
            (await self.sessions.open(name)).unrecorded[path] += 1
        return await self._forward(request, sent, await request.read(), NOT_RECORDED)

    async def _forward(
        self, request: web.Request, path: str, body: bytes, marks: Mapping[str, str]
    ) -> web.StreamResponse:
        if ".." in _SEPARATOR.split(unquote(path)):
            return response_of(error_reply(400, "The path must not contain '..'.", "BadRequestError"))
        target = path + _query(request)
        async with self._upstream.exchange(request.method, target, request.headers, body) as answer:
            headers = {**forwarded_headers(answer.headers), **marks}
            if "content-type" in answer.headers:
                headers["content-type"] = answer.headers["content-type"]
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            try:
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                # One side closed the connection: abort the other, so that a partial response is not taken as complete.
                if request.transport is not None:
                    request.transport.abort()
            return response

    async def end(self, request: web.Request) -> web.Response:
        """POST /session/{session}/end: end the episode; ``reward`` or ``success`` is stored as its score."""
        name = session_name(request.match_info["session"], "", {}, {}, ()).name
        try:
            outcome = await read_body(await request.read() or b"{}", EndRequest.model_validate_json)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(each) for each in problem["loc"])
            return response_of(error_reply(400, f"{where}: {problem['msg']}", "BadRequestError"))
        if too_deep(outcome.evidence):
            return response_of(error_reply(400, f"evidence: has more than {DEEPEST} levels", "BadRequestError"))
        low, high = self._config.reward_min, self._config.reward_max
        if (reward := outcome.told) is not None and not low <= reward <= high:
            # One reward far above the others decides what is learnt, and anybody who may write here can tell it.
            message = f"reward: has to be from {low:g} to {high:g}; raise --reward-min or --reward-max of the gateway"
            return response_of(error_reply(400, message, "BadRequestError"))
        evidence: JsonObject = {**outcome.evidence, "ended_by": "client"}
        if outcome.success is not None:
            evidence["success"] = outcome.success
        ended = await self.sessions.end(name, StopReason.TERMINATED, evidence)
        trajectory_id = ended[0] if ended is not None else await self.sessions.last_episode(name)
        if trajectory_id is None:
            return response_of(error_reply(404, f"There is no session {name!r}.", "NotFoundError"))
        scored = await self._score(trajectory_id, outcome)
        answer = {"session": name, "trajectory_id": trajectory_id, "ended": ended is not None, "scored": scored}
        return response_of(Reply(200, dump_object(answer)))

    async def _score(self, trajectory_id: str, outcome: EndRequest) -> bool:
        reward = outcome.told
        if reward is None:
            return False
        detail: JsonObject = {} if outcome.success is None else {"success": outcome.success}
        score = Score(trajectory_id=trajectory_id, reward=reward, detail=detail, reward_version=_REWARD_VERSION)
        await self._storage.add_scores((score,))
        return True

    async def _stream(
        self, request: web.Request, call_in_flight: PendingCall, protocol: WireProtocol
    ) -> web.StreamResponse:
        """The events as they come. Until the first, and in long pauses, keep-alive comments; they fix status 200."""
        live, task, silence = call_in_flight.live, call_in_flight.task, self._config.keep_alive
        if await live.wait(task, silence) and not live.begun:
            call_in_flight.delivered |= _connected(request)
            return response_of(task.result())
        headers = {**live.headers, "content-type": EVENTS, "cache-control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        # A client that disconnects receives the answer when it retries.
        with suppress(ConnectionError):
            await response.prepare(request)
            async for part in live.parts(task, silence):
                await response.write(part)
            reply = task.result()
            if reply.status != 200 or not live.begun:
                await response.write(_late(reply, protocol))
            if reply.status != 200 and live.begun and request.transport is not None:
                # Not the end of a complete answer, also for a client that overlooks the error.
                request.transport.close()
                return response
            await response.write_eof()
            call_in_flight.delivered = True
        return response


def _connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _query(request: web.Request) -> str:
    """The query as it was sent, with its ``?``; empty when there is none."""
    query = request.rel_url.raw_query_string
    return f"?{query}" if query else ""


def _late(reply: Reply, protocol: WireProtocol) -> bytes:
    """A reply without events, for a client whose stream has already started."""
    if reply.status == 200:
        return event(b"".join(reply.body.splitlines()))
    error = (parse_object(reply.body) or {}).get("error")
    known = error if isinstance(error, dict) else {"message": reply.body[:_LONGEST_ERROR].decode("utf-8", "replace")}
    return protocol.error_event(known)


_LOG = redacting_logger(__name__)
_SHUTDOWN_SECONDS = 10.0
_MAX_SWEEP_SECONDS = 60.0


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig,
    storage: TrajectoryStorage,
    clock: Clock = time.monotonic,
) -> AsyncIterator[str]:
    """A gateway in this event loop; yields its URL, without ``/v1``. All sessions are ended on exit.

    ``clock``: seconds, for when a field that a model refused is tried again.

    Raises ``PortUnavailableError``, and ``StorageError`` when the storage cannot be read or written. The storage stays
    open.
    """
    gateway = Gateway(config, storage, clock)
    with listening(config.host, config.port) as listener:
        await gateway.sessions.start()
        runner = web.AppRunner(
            gateway.app(),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
            logger=library_logger(),
            auto_decompress=False,
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        sweeper = asyncio.create_task(_sweep(gateway.sessions, min(60 * config.idle_minutes / 4, _MAX_SWEEP_SECONDS)))
        try:
            yield url_of(listener)
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await runner.cleanup()
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
