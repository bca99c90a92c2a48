"""The model server behind a session: sends a request and returns the body of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import httpx
from pydantic_core import to_json

from openhands_rl_plugin.core.concurrency import LoopThread, background
from openhands_rl_plugin.core.errors import EpisodeError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import error_in
from openhands_rl_plugin.models.engines.extensions import ExtensionTable
from openhands_rl_plugin.models.gateway.token_id_text import Json, dump_object, parse_object

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
_MAX_BODY = 256 * 1024 * 1024


class ServerError(Exception):
    """The server answered an error, or not at all: ``status`` is that of HTTP, 408 where it was too slow, and 500 where
    no connection was made. ``body`` is what it sent. With a status of 200 the answer had no choice."""

    def __init__(self, status: int, message: str, body: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.body = status, body or message.encode()

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return not 400 <= self.status < 500 or self.status in _WORTH_A_RETRY

    def as_failure(self) -> EpisodeError:
        """``ModelError`` when the server refuses the request itself, else ``InfrastructureError``."""
        return (InfrastructureError if self.is_temporary else ModelError)(str(self))


class Upstream(Protocol):
    """A source of answers. ``fields``: the extensions that it may be asked for."""

    fields: tuple[str, ...]
    extensions: ExtensionTable

    async def send(self, body: Json) -> bytes:
        """The body of the answer. Raises ``ServerError``."""
        ...


@lru_cache(16)
def extensions_of(base_url: str) -> ExtensionTable:
    """What the models of one server accept; shared by all sessions of the process."""
    return ExtensionTable()


@lru_cache(4)
def _client(loop: LoopThread, secure: bool) -> httpx.AsyncClient:
    """One for all sessions; it belongs to the background loop."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(verify=secure, trust_env=secure, follow_redirects=True, limits=limits, timeout=None)


class HttpUpstream:
    """``POST {base_url}/chat/completions``. ``timeout``: seconds of a request, from the connection to the last byte."""

    def __init__(
        self,
        base_url: str,
        key: str | None,
        timeout: float,
        *,
        fields: tuple[str, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.fields = fields
        self.extensions = extensions_of(base_url)
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._timeout = timeout
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._headers |= headers or {}

    async def send(self, body: Json) -> bytes:
        """As ``Upstream.send``."""
        client = _client(background(), self._url.startswith("https:"))
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout),
                client.stream("POST", self._url, content=_json(body), headers=self._headers) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > _MAX_BODY:
                        raise ServerError(400, f"the model server answered more than {_MAX_BODY} bytes")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerError(408, "Request timed out.") from error
        except httpx.TransportError as error:
            raise ServerError(500, "Connection error.") from error
        answer, status = bytes(content), response.status_code
        if response.is_success:
            found = error_in(parse_object(answer)) if b'"error"' in answer else None
            if found is None:
                return answer
            status = found[0]
        told = parse_object(answer) or answer[:1000].decode("utf-8", "replace")
        raise ServerError(status, f"Error code: {status} - {told}", answer)


def _json(body: Json) -> bytes:
    try:
        return to_json(body)
    except ValueError:  # half of a surrogate pair
        return dump_object(body)
