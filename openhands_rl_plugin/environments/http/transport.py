"""JSON over HTTP to an environment server; every failure is a typed error.

An unreachable, slow or failing server raises ``InfrastructureError``; an answer that violates the protocol raises
``BadEnvironmentError``. A request is sent once: only the caller knows whether it may be repeated.
"""

from __future__ import annotations

import asyncio
import json
from typing import NoReturn, Self

import httpx
from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.messages import whole_json
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import JsonObject

_EXCERPT_CHARACTERS = 200
_OVERLOADED = frozenset({408, 425, 429})
_NOT_OFFERED = frozenset({404, 405})
# Of what stands between, or of a server that is too busy to say more.
_NOT_ITS_OWN = frozenset({*range(300, 400), *_OVERLOADED, 502, 503, 504})


class EndpointMissingError(BadEnvironmentError):
    """The server has no such path (404 or 405)."""


class UnavailableError(InfrastructureError):
    """The request was certainly not executed: the server is unreachable, or reports that it is busy (503)."""


class JsonTransport:
    """POSTs JSON to one server and returns the JSON of the answer.

    Args:
        base_url: where the server listens, without a path.
        timeout: seconds for one request, from the connection to the last byte.
        max_bytes: longest answer that is read.
        key: sent with every request as a bearer token; empty: none is.
    """

    def __init__(self, base_url: str, *, timeout: float, max_bytes: int, key: str = "") -> None:
        self._users = 1
        self._base_url = base_url
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._key = key
        url = httpx.URL(base_url)
        self._client = httpx.AsyncClient(
            base_url=base_url,
            timeout=timeout,
            follow_redirects=False,
            # Loopback requests must not use a proxy from the environment variables. A TLS context is created for https
            # only: that takes longer than an episode's first request.
            trust_env=not is_loopback(url.host),
            verify=url.scheme == "https",
            headers={"accept": "application/json", "accept-encoding": "identity"}
            | ({"authorization": f"Bearer {key}"} if key else {}),
        )

    async def post(self, path: str, body: JsonObject) -> JsonValue:
        """Send ``body`` to ``path`` once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        return await self._exchange("POST", path, body)

    async def get(self, path: str) -> JsonValue:
        """Read ``path`` once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        return await self._exchange("GET", path, None)

    async def ask(self, path: str, body: JsonObject) -> tuple[int, str]:
        """Send ``body`` to ``path`` once; the status and the text of the server's own answer, refusals among them.

        Raises as ``post`` for what is not the server's own: overload, redirects, a broken connection.
        """
        response, content = await self._send("POST", path, body)
        if response.status_code in _NOT_ITS_OWN:
            check_status(f"{self._base_url}{path}", response.status_code, content, response.headers.get("location"))
        return response.status_code, content.decode("utf-8", errors="replace")

    async def _exchange(self, method: str, path: str, body: JsonObject | None) -> JsonValue:
        response, content = await self._send(method, path, body)
        where = f"{self._base_url}{path}"
        check_status(where, response.status_code, content, response.headers.get("location"))
        return decode_json(where, content)

    async def _send(self, method: str, path: str, body: JsonObject | None) -> tuple[httpx.Response, bytes]:
        try:
            async with asyncio.timeout(self._timeout), self._client.stream(method, path, json=body) as response:
                return response, await self._read(response, path)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(
                f"nothing answers at {self._base_url}: start the server (the embedded shop: `openhands-rl env webshop`)"
                " or set env_server_base and env_port"
            ) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise InfrastructureError(
                f"{self._base_url}{path} did not answer within {self._timeout:g} s: check the server's load or raise"
                " the timeout"
            ) from error
        except httpx.TransportError as error:
            raise InfrastructureError(
                f"the connection to {self._base_url} broke during {path} ({type(error).__name__}):"
                " check whether the server is still running"
            ) from error

    def share(self) -> Self:
        """This transport, with one more user; each user calls ``close``."""
        self._users += 1
        return self

    async def close(self) -> None:
        """Close the connections when the last user is done."""
        self._users -= 1
        if self._users == 0:
            await self._client.aclose()

    async def _read(self, response: httpx.Response, path: str) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BadEnvironmentError(
                f"{self._base_url}{path} sent a compressed answer, which was not requested: disable compression there"
            )
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._max_bytes:
                raise BadEnvironmentError(
                    f"{self._base_url}{path} answered more than {self._max_bytes} bytes:"
                    " make its observations shorter or raise max_response_bytes"
                )
        return bytes(content)


class CookieTransport(JsonTransport):
    """For servers that identify an episode by a cookie: ``share`` returns a transport with its own session.

    The cookies of the answers are sent back with every request.
    """

    @property
    def has_session(self) -> bool:
        """Whether the server has set a cookie."""
        return len(self._client.cookies) > 0

    def share(self) -> Self:
        """A new transport to the same server, without this one's cookies."""
        return type(self)(self._base_url, timeout=self._timeout, max_bytes=self._max_bytes, key=self._key)


def check_status(where: str, status: int, content: bytes, location: str | None = None) -> None:
    """Raise the typed error for an HTTP status of 300 or more. ``location``: the target of a redirect."""
    if status < 300:
        return
    said = f"{where} answered {status}: {excerpt(content)}"
    if status == 503:
        raise UnavailableError(said)
    if status in _NOT_OFFERED:
        raise EndpointMissingError(f"{said} (is this the address of an environment server?)")
    if status in _OVERLOADED or status >= 500:
        raise InfrastructureError(said)
    if status < 400:
        target = (location or "elsewhere")[:_EXCERPT_CHARACTERS]
        raise BadEnvironmentError(f"{where} redirects to {target}, which is not followed: set the server's own address")
    raise BadEnvironmentError(said)


def decode_json(where: str, content: bytes) -> JsonValue:
    """The JSON in ``content``. Raises ``BadEnvironmentError`` for invalid JSON, NaN and Infinity."""
    try:
        answer = json.loads(content, parse_constant=_refuse_constant)
        return whole_json(answer) if b"\\u" in content else answer
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _ConstantError) else "something that is not valid JSON"
        raise BadEnvironmentError(
            f"{where} answered {reason}: {excerpt(content)} (is this an environment server?)"
        ) from error


class _ConstantError(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(f"{name}, which is neither JSON nor a reward")


def excerpt(content: bytes | str) -> str:
    """The first 200 characters on one line."""
    text = content[: 4 * _EXCERPT_CHARACTERS]
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return " ".join(text.split())[:_EXCERPT_CHARACTERS] or "(empty)"
