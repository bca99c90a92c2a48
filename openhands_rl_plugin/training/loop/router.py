"""Partial rollouts that continue on the newest weights: a proxy that replaces every version by the one in use.

Episodes keep requesting the version that they started on; the router in front of the model server requests the one that
the store's pointer names. The response names that version, so every sampled node records the version that sampled it.
An episode that started on the base model, before there was a version, ends on it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.servers import listening, serving
from openhands_rl_plugin.core.types import PolicyRef

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.store import AdapterStore

_PASSED = ("content-type", "retry-after")
_ROUTED = frozenset({"/v1/chat/completions", "/v1/completions"})


@contextmanager
def running_router(upstream: str, store: AdapterStore, adapter: str, *, timeout: float = 600.0) -> Iterator[str]:
    """Route to the model server at ``upstream`` until the block ends; yields the URL, without ``/v1``.

    Loopback only. ``timeout``: seconds per request. Raises ``InfrastructureError`` when the router cannot be started.
    """
    router = _Router(upstream, store, adapter, timeout)
    with listening("127.0.0.1", 0) as listener, serving(router.app(), listener) as url:
        yield url


@contextmanager
def rollout_settings(settings: RLSettings, store: AdapterStore) -> Iterator[RLSettings]:
    """The settings of the rollouts: through a router, where ``[rl.loop]`` lets episodes continue on newer weights.

    Other clients, such as the publisher, use the server itself. Raises as ``running_router`` does.
    """
    loop, serving = settings.loop, settings.serving
    if (loop.kind, loop.partial_rollouts) != ("async", "continue"):
        yield settings
        return
    with running_router(serving.base_url, store, serving.adapter, timeout=serving.request_timeout) as url:
        yield settings.model_copy(update={"serving": serving.model_copy(update={"base_url": f"{url}/v1"})})


class _Router:
    def __init__(self, upstream: str, store: AdapterStore, adapter: str, timeout: float) -> None:
        self._root = upstream.rstrip("/").removesuffix("/v1")
        self._store = store
        self._adapter = adapter
        secure = upstream.startswith("https:")
        self._client = httpx.AsyncClient(timeout=timeout, verify=secure, trust_env=secure)

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self._client.aclose()

        route = Route("/{path:path}", self.forward, methods=["GET", "POST"])
        return Starlette(routes=[route], lifespan=lifespan)

    async def forward(self, request: Request) -> Response:
        """Stream the upstream's response; an unavailable server is a 503, which clients retry."""
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name in ("authorization", "content-type")}
        try:
            if request.url.path in _ROUTED:
                body = self._routed(body)
            sent = self._client.build_request(
                request.method, f"{self._root}{request.url.path}", content=body, headers=headers
            )
            answer = await self._client.send(sent, stream=True)
        except httpx.TransportError as error:
            return _refusal(503, f"no model server answers at {self._root} ({describe(error)})")
        except StorageError as error:
            return _refusal(503, str(error))
        passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
        return StreamingResponse(_content(answer), answer.status_code, passed)

    def _routed(self, body: bytes) -> bytes:
        """The request body, with the version in use in place of any version of the adapter."""
        try:
            asked: Any = json.loads(body)
        except ValueError:
            return body  # the server rejects it with a reason
        model = asked.get("model") if isinstance(asked, dict) else None
        if not isinstance(model, str):
            return body
        base, colon, name = model.rpartition(":")  # SGLang's form is BASE:ADAPTER
        if PolicyRef.from_served_name("", name).adapter != self._adapter:
            return body
        current = self._store.current(self._adapter)
        return body if current is None else json.dumps({**asked, "model": f"{base}{colon}{current.name}"}).encode()


async def _content(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_bytes():
            yield part
    finally:
        await answer.aclose()


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "ServiceUnavailableError"}}, status)
