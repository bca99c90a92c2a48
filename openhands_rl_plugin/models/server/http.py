"""JSON responses, server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from openhands_rl_plugin.models.generator.errors import RequestCancelled, ServingError

SSE_DONE = "data: [DONE]\n\n"
"""The last event of every stream."""


def json_response(body: Mapping[str, Any], status: int = 200) -> Response:
    """``body`` as a response."""
    return Response(to_json(body, inf_nan_mode="null"), status, media_type="application/json")


def sse_event(body: Mapping[str, Any]) -> str:
    """``body`` as a server-sent event."""
    return f"data: {to_json(body, inf_nan_mode='null').decode()}\n\n"


async def unless_disconnected[T](request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``; raises ``ClientDisconnect``, with ``work`` cancelled, when the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.wait({working, disconnected})
        if not working.cancelled():
            working.exception()  # a gather that is cancelled ends with an error, which the log would have otherwise


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: ServingError) -> Response:
    """The body of ``error`` with its status."""
    return json_response(error_body(error.status, error.message, error.kind, error.param), error.status)


async def _on_serving_error(_: Request, error: ServingError) -> Response:
    return error_response(error)


async def _on_invalid_body(_: Request, error: ValidationError) -> Response:
    """400 with the first three problems, each with its field."""
    problems = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:3]]
    first = error.errors()[0]["loc"]
    body = error_body(400, "; ".join(problems), "BadRequestError", str(first[0]) if first else None)
    return json_response(body, 400)


async def _on_http_exception(_: Request, error: HTTPException) -> Response:
    """An unknown path or method."""
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return json_response(error_body(error.status_code, error.detail, kind), error.status_code)


async def _on_cancelled(_: Request, __: RequestCancelled) -> Response:
    """The generator cancelled a request of a connected client, because it is stopping."""
    return json_response(error_body(503, "The server is stopping.", "ServiceUnavailableError"), 503)


async def _on_disconnect(_: Request, __: ClientDisconnect) -> Response:
    """For the access log only: the client has closed the connection."""
    return Response(status_code=499)


ERROR_HANDLERS: Mapping[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
    ServingError: _on_serving_error,
    ValidationError: _on_invalid_body,
    HTTPException: _on_http_exception,
    RequestCancelled: _on_cancelled,
    ClientDisconnect: _on_disconnect,
}
"""The ``exception_handlers`` of a Starlette application."""
