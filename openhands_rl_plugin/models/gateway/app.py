"""HTTP routes of the gateway."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import JsonObject, Score, StopReason
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.deduplication import PendingCall
from openhands_rl_plugin.models.gateway.json_text import dump_object
from openhands_rl_plugin.models.gateway.recorder import CHAT, Recorder
from openhands_rl_plugin.models.gateway.replies import EVENTS, Reply, error_reply
from openhands_rl_plugin.models.gateway.requests import Unrecordable, parse_request
from openhands_rl_plugin.models.gateway.session_names import session_name
from openhands_rl_plugin.models.gateway.sessions import SessionPool
from openhands_rl_plugin.models.gateway.sse import DONE, KEEP_ALIVE, event
from openhands_rl_plugin.models.gateway.upstream import Upstream, UpstreamError, forwarded_headers

_HEALTH = "/health"
_REWARD_VERSION = "gateway"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndRequest(BaseModel):
    """Body of ``/session/{session}/end``. ``success`` without ``reward`` is a reward of 1 or 0."""

    model_config = ConfigDict(extra="forbid")

    reward: FiniteFloat | None = None
    success: bool | None = None
    evidence: Annotated[JsonObject, Field(default_factory=dict)]


class Gateway:
    """Request handlers of the gateway; they share one recorder and one pool of sessions."""

    def __init__(self, config: GatewayConfig, storage: TrajectoryStorage) -> None:
        self._config = config
        self._storage = storage
        self._upstream = Upstream(config)
        self._recorder = Recorder(config, self._upstream)
        self._expected = config.client_key().encode()
        self._in_flight = 0
        self.sessions = SessionPool(
            storage,
            run_id=config.run_id,
            base_model=config.base_model,
            max_sessions=config.max_sessions,
            idle=60 * config.idle_minutes,
        )

    def app(self) -> web.Application:
        """The application with its routes, API key check and limits."""
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.router.add_get(_HEALTH, self.health)
        for prefix in ("", "/session/{session}"):
            app.router.add_post(f"{prefix}/v1/{CHAT}", self.chat)
            app.router.add_route("*", f"{prefix}/v1/{{path:.+}}", self.pass_through)
        app.router.add_post("/session/{session}/end", self.end)
        return app

    async def aclose(self) -> None:
        """Close the connections to the model server."""
        await self._upstream.aclose()

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: counters since the start."""
        counts = {"sessions": len(self.sessions), "in_flight": self._in_flight, **asdict(self._recorder.counts)}
        return _response(Reply(200, dump_object({"status": "ok", **counts})))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = await request.read()
        try:
            call = parse_request(body)
        except Unrecordable as problem:
            return _response(self._recorder.unrecorded(await self._upstream.post(CHAT, request.headers, body), problem))
        name = session_name(
            request.match_info.get("session", ""), request.remote or "", request.headers, call.document, call.messages
        )
        session = await self.sessions.open(name)
        headers = request.headers.copy()
        call_in_flight = session.pending.join(
            body, headers, lambda: _connected(request), lambda: self._recorder.ask(session, call, headers)
        )
        if call.streams:
            return await self._stream(request, call_in_flight)
        reply = await asyncio.shield(call_in_flight.task)
        call_in_flight.delivered |= _connected(request)
        return _response(reply)

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """Any other path below /v1: forwarded unchanged and not recorded."""
        path = request.raw_path.partition("/v1/")[2]
        if ".." in unquote(path.partition("?")[0]).split("/"):
            return _response(error_reply(400, "The path must not contain '..'.", "BadRequestError"))
        body = await request.read()
        async with self._upstream.exchange(request.method, path, request.headers, body) as answer:
            headers = forwarded_headers(answer.headers)
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
        name = session_name(request.match_info["session"], "", {}, {}, ())
        try:
            outcome = EndRequest.model_validate_json(await request.read() or b"{}")
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(each) for each in problem["loc"])
            return _response(error_reply(400, f"{where}: {problem['msg']}", "BadRequestError"))
        evidence: JsonObject = {**outcome.evidence, "ended_by": "client"}
        if outcome.success is not None:
            evidence["success"] = outcome.success
        ended = await self.sessions.end(name, StopReason.TERMINATED, evidence)
        trajectory_id = ended[0] if ended is not None else await self.sessions.last_episode(name)
        if trajectory_id is None:
            return _response(error_reply(404, f"There is no session {name!r}.", "NotFoundError"))
        scored = await self._score(trajectory_id, outcome)
        answer = {"session": name, "trajectory_id": trajectory_id, "ended": ended is not None, "scored": scored}
        return _response(Reply(200, dump_object(answer)))

    async def _score(self, trajectory_id: str, outcome: EndRequest) -> bool:
        reward = outcome.reward if outcome.reward is not None or outcome.success is None else float(outcome.success)
        if reward is None:
            return False
        detail: JsonObject = {} if outcome.success is None else {"success": outcome.success}
        score = Score(trajectory_id=trajectory_id, reward=reward, detail=detail, reward_version=_REWARD_VERSION)
        await self._storage.add_scores((score,))
        return True

    async def _stream(self, request: web.Request, call_in_flight: PendingCall) -> web.StreamResponse:
        """The events once the answer is complete. Until then keep-alive comments; the first fixes status 200."""
        if await _done(call_in_flight, self._config.keep_alive):
            call_in_flight.delivered |= _connected(request)
            return _response(call_in_flight.task.result())
        response = web.StreamResponse(headers={"content-type": EVENTS, "cache-control": "no-cache"})
        # A client that disconnects receives the answer when it retries.
        with suppress(ConnectionError):
            await response.prepare(request)
            while not await _done(call_in_flight, self._config.keep_alive):
                await response.write(KEEP_ALIVE)
            reply = call_in_flight.task.result()
            await response.write(reply.body if reply.content_type.startswith(EVENTS) else _late(reply))
            await response.write_eof()
            call_in_flight.delivered = True
        return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check the API key and the number of concurrent requests; return errors in OpenAI's format."""
        if request.path == _HEALTH:
            return await handler(request)
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if self._expected and not hmac.compare_digest(given, b"Bearer " + self._expected):
            return _response(error_reply(401, "The API key of the gateway is missing or wrong.", "Unauthorized"))
        if self._in_flight >= self._config.max_in_flight:
            message = f"The gateway has {self._in_flight} requests in flight; retry later or raise --max-in-flight."
            return _response(error_reply(503, message, "ServiceUnavailableError", {"retry-after": "1"}))
        self._in_flight += 1
        try:
            return await handler(request)
        except UpstreamError as error:
            return _response(error.reply)
        except StorageError as error:
            return _response(error_reply(503, str(error), "ServiceUnavailableError"))
        except web.HTTPRequestEntityTooLarge:
            message = f"The request body exceeds {self._config.max_body_bytes} bytes; raise --max-body-bytes."
            return _response(error_reply(413, message, "BadRequestError"))
        except web.HTTPException as error:
            return _response(
                error_reply(error.status, f"{request.method} {request.path}: {error.reason}", "NotFoundError")
            )
        finally:
            self._in_flight -= 1


async def _done(call_in_flight: PendingCall, seconds: float) -> bool:
    done, _ = await asyncio.wait({call_in_flight.task}, timeout=seconds)
    return bool(done)


def _late(reply: Reply) -> bytes:
    """A reply without events (an error), as an event for a client whose stream has already started."""
    return event(b"".join(reply.body.splitlines())) + DONE


def _response(reply: Reply) -> web.Response:
    return web.Response(
        status=reply.status, body=reply.body, headers={**reply.headers, "content-type": reply.content_type}
    )


def _connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()
