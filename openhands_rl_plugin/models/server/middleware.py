"""ASGI middleware: the API key and the size of request bodies."""

from __future__ import annotations

import hmac

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openhands_rl_plugin.models.generator.errors import BodyTooLarge, Unauthorized
from openhands_rl_plugin.models.server.error_handlers import error_response

# Paths that need no key: health checks of a load balancer send none.
_OPEN_PATHS = frozenset({"/health"})


def access_middleware(key: str, max_body_bytes: int) -> list[Middleware]:
    """What every server puts in front of its routes; an empty ``key`` lets every client in."""
    size = Middleware(LimitBody, limit=max_body_bytes)
    return [Middleware(RequireKey, key=key), size] if key else [size]


class RequireKey:
    """Refuses requests without ``Authorization: Bearer <key>``; compares in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await error_response(Unauthorized("Unauthorized"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitBody:
    """Refuses bodies over ``limit`` bytes, announced or not, before they are held in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._limit:
            await error_response(self._error())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is over {self._limit} bytes; raise the server's --max-body-bytes.")
