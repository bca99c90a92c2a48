"""What stands in front of an ASGI application: who is let in, bodies of bounded size, metrics, an access log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from openhands_rl_plugin.core.errors import CaughtFailure, RLError, boundary
from openhands_rl_plugin.core.servers.bodies import too_many_values
from openhands_rl_plugin.core.servers.connections import Connections, peer_of
from openhands_rl_plugin.core.servers.door import METRICS, Door, Refusal
from openhands_rl_plugin.core.servers.metrics import CONTENT_TYPE, Metrics
from openhands_rl_plugin.core.servers.observed import ObservedRequests, note_failure
from openhands_rl_plugin.core.types import FailureKind

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

MIB = 1024**2
_SMALL_BODY = 64 * 1024
_HELD_BODIES = 1024 * MIB
"""Bytes of the bodies of all requests together; past it only small ones are read."""
_LEFT = 499


class GuardedApp:
    """An ASGI application behind a door. The application gets a request when its body has arrived."""

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        *,
        max_body_bytes: int,
        connections: Connections,
        metrics: Metrics,
        observed: ObservedRequests,
    ) -> None:
        self._app = app
        self._door = door
        self._limit = max_body_bytes
        self._connections = connections
        self._metrics = metrics
        self._observed = observed
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, peer = time.perf_counter(), _LEFT, peer_of(scope.get("client"))
        failed: list[Message] = []

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            # Frameworks answer for an exception before they let it through: in words of their own.
            await (_keep(failed, message) if status == 500 else send(message))

        try:
            with boundary(FailureKind.INFRASTRUCTURE, "server"):
                await self._answer(scope, receive, observed)
            for message in failed:
                await send(message)
        except RLError as error:
            said = note_failure(error.__cause__ if isinstance(error, CaughtFailure) and error.__cause__ else error)
            if status in (_LEFT, 500):
                status = 500
                await _refuse(Refusal(500, "InternalServerError", said), send)
        except asyncio.CancelledError:
            # The server stops, and waits no longer; what a client has half of is cut off.
            if status == _LEFT:
                status = 503
                await _refuse(Refusal(503, "ServiceUnavailableError", "The server is stopping."), send)
        finally:
            self._connections.answered(peer)
            seconds = time.perf_counter() - started
            self._observed.ended(scope["method"], scope["path"], status, seconds, peer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        refused = self._door.refusal(scope["method"], scope["path"], headers) or self._too_large(headers)
        if refused is not None:
            await _refuse(refused, send)
        elif scope["path"] == METRICS and scope["method"] in ("GET", "HEAD"):
            await _send(200, CONTENT_TYPE, self._metrics.text().encode(), send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []
        size, more = 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                self._held += len(parts[-1])
                if size > self._limit:
                    return await _refuse(self._over(), send)
                if size > _SMALL_BODY and self._held > _HELD_BODIES:
                    full = "Too many bytes of requests are being received; retry later."
                    return await _refuse(Refusal(503, "ServiceUnavailableError", full), send)
        finally:
            self._held -= size
        self._connections.arrived(peer_of(scope.get("client")))
        body: bytes | None = b"".join(parts)
        parts.clear()
        if (refused := too_many_values(body)) is not None:
            return await _refuse(refused, send)

        async def replayed() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, replayed, send)

    def _too_large(self, headers: dict[str, str]) -> Refusal | None:
        announced = headers.get("content-length", "0")
        if not (announced.isascii() and announced.isdigit()) or len(announced) > 18:
            return Refusal(400, "BadRequestError", "The Content-Length is not a number of bytes.")
        return self._over() if int(announced) > self._limit else None

    def _over(self) -> Refusal:
        message = f"The request body is over {self._limit} bytes; raise the server's --max-body-bytes."
        return Refusal(413, "BadRequestError", message)


def _headers(scope: Scope) -> dict[str, str]:
    """By lower-case name; one that is given several times is joined, so that no check sees half of it."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
        found[key] = f"{found[key]},{text}" if key in found else text
    return found


async def _keep(kept: list[Message], message: Message) -> None:
    kept.append(message)


async def _refuse(refused: Refusal, send: Send) -> None:
    error = {"message": refused.message, "type": refused.kind, "param": None, "code": refused.status}
    await _send(refused.status, "application/json", json.dumps({"error": error}).encode(), send)


async def _send(status: int, content_type: str, body: bytes, send: Send) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
