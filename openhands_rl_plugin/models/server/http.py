"""JSON responses, server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

SSE_DONE = "data: [DONE]\n\n"
"""The last event of every stream."""


def json_response(body: BaseModel, status: int = 200) -> Response:
    """``body`` as a response."""
    return Response(body.model_dump_json(), status, media_type="application/json")


def sse_event(body: BaseModel) -> str:
    """``body`` as a server-sent event; fields that are ``None`` are left out."""
    return f"data: {body.model_dump_json(exclude_none=True)}\n\n"


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
