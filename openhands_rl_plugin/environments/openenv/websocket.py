"""OpenEnv's WebSocket: one connection is one episode. Every failure is a typed error.

An unreachable, full, slow or dead server raises ``InfrastructureError``; an answer that violates the protocol, or a
failure of the environment itself, raises ``BadEnvironmentError``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, Never
from urllib.parse import urlsplit

import aiohttp
from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.servers.door import is_loopback
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.http.client import RefusedActionError
from openhands_rl_plugin.environments.http.transport import (
    UnavailableError,
    check_status,
    decode_json,
    excerpt,
)

_PATH = "/ws"
_LONGEST_CLOSING = 5.0
_MOST_REASONS = 3
_TOO_BIG = 1009
_SAID = aiohttp.WSMsgType.TEXT
# Failures of the server itself, or of the machines behind it, rather than of the environment.
_BROKEN = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})


class NoPlaceError(UnavailableError):
    """The server has as many episodes as it may. ``most``: how many those are, where it says that."""

    def __init__(self, message: str, most: int | None = None) -> None:
        super().__init__(message)
        self.most = most


class OpenEnvSession:
    """Sends one request at a time, each once.

    The connection is read all the time by a task of its own: a server drops a client that leaves its pings unanswered,
    and a model may need minutes for a response.

    Args:
        base_url: where the server listens, without a path.
        timeout: seconds for the connection, and for one answer.
        max_bytes: longest answer that is read.
        key: sent as a bearer token; empty: none is.
    """

    def __init__(self, base_url: str, *, timeout: float, max_bytes: int, key: str = "") -> None:
        self._base_url = base_url
        self._where = base_url + _PATH
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client: aiohttp.ClientSession | None = None
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._listener: asyncio.Task[None] | None = None
        self._heard: asyncio.Queue[str | EpisodeError] = asyncio.Queue()
        self._end: EpisodeError | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._connection is not None and self._end is None

    async def open(self) -> None:
        """Connect, once. Raises ``InfrastructureError`` or ``BadEnvironmentError``; then nothing is left to close."""
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        self._client = aiohttp.ClientSession(
            # As for HTTP: no proxy between this process and its own machine, no cookies, no redirects.
            trust_env=not is_loopback(urlsplit(self._base_url).hostname or ""),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            trace_configs=[tracing],
        )
        try:
            self._connection = await self._connect(self._client)
        except BaseException:
            await self._client.close()
            raise
        self._listener = asyncio.create_task(self._listen(self._connection))

    async def ask(self, kind: str, data: JsonObject | None = None, *, answered_by: str = "observation") -> JsonObject:
        """Send a message of this ``kind`` and return the data of the answer, which must be of kind ``answered_by``.

        Raises ``RefusedActionError`` when a step was not executed because its action is invalid.
        """
        if self._connection is None:
            raise RuntimeError("the connection is not open")
        if not self._heard.empty():
            self._refuse_unasked(self._heard.get_nowait())
        message: JsonObject = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._timeout):
                # When sending fails, the reading task has the reason.
                with suppress(aiohttp.ClientError, ConnectionError):
                    await self._connection.send_str(json.dumps(message))
                heard = await self._next()
        except TimeoutError as error:
            self._end = InfrastructureError(
                f"{self._where} did not answer a {kind} within {self._timeout:g} s: check the server's load or raise"
                " the timeout"
            )
            raise self._end from error
        except asyncio.CancelledError:
            self._end = InfrastructureError(f"the connection to {self._where} was cancelled during a {kind}")
            raise
        return self._read(heard, kind, answered_by)

    async def close(self) -> None:
        """Send ``close`` and wait briefly until the server releases the episode: its capacity may be limited."""
        if self._client is None or self._connection is None or self._listener is None:
            return
        try:
            if self._end is None:
                with suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                    async with asyncio.timeout(min(self._timeout, _LONGEST_CLOSING)):
                        await self._connection.send_str('{"type": "close"}')
                        await asyncio.wait({self._listener})
        finally:
            self._end = self._end or InfrastructureError(f"the connection to {self._where} is closed")
            self._listener.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_CLOSING):
                    await self._connection.close()
            await self._client.close()

    async def _connect(self, client: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            async with asyncio.timeout(self._timeout):
                return await client.ws_connect(self._where, max_msg_size=self._max_bytes)
        except aiohttp.WSServerHandshakeError as error:
            check_status(self._where, error.status, error.message.encode())
            raise BadEnvironmentError(
                f"{self._where} answered {error.status} instead of a WebSocket (is this an OpenEnv server?)"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(
                f"nothing answers at {self._base_url}: start the OpenEnv server or set env_server_base and env_port"
            ) from error
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self._where} did not answer within {self._timeout:g} s: check the server's load"
            ) from error
        except aiohttp.ClientError as error:
            raise self._broke(type(error).__name__) from error

    async def _listen(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        while (message := await connection.receive()).type is _SAID and self._heard.empty():
            self._heard.put_nowait(message.data)
        if message.type is aiohttp.WSMsgType.ERROR and connection.close_code == _TOO_BIG:
            end: EpisodeError = BadEnvironmentError(
                f"{self._where} answered more than {self._max_bytes} bytes:"
                " make its observations shorter or raise max_response_bytes"
            )
        elif message.type in (_SAID, aiohttp.WSMsgType.BINARY):
            end = BadEnvironmentError(f"{self._where} sent an unexpected message: {excerpt(message.data)}")
        else:
            end = self._broke(f"close code {connection.close_code}")
        self._end = self._end or end
        self._heard.put_nowait(end)

    async def _next(self) -> str:
        heard = self._end if self._end is not None and self._heard.empty() else await self._heard.get()
        if isinstance(heard, str):
            return heard
        raise heard

    def _read(self, heard: str, kind: str, answered_by: str) -> JsonObject:
        answer = decode_json(self._where, heard.encode())
        said = answer.get("type") if isinstance(answer, dict) else None
        data = answer.get("data") if isinstance(answer, dict) else None
        if said not in (answered_by, "error") or not isinstance(data, dict):
            raise BadEnvironmentError(f"{self._where} answered a {kind} with {excerpt(heard)}")
        if said == "error":
            self._raise_error(data, kind)
        return data

    def _refuse_unasked(self, heard: str | EpisodeError) -> Never:
        if isinstance(heard, EpisodeError):
            raise heard
        # A full server sends its error before the first request.
        self._read(heard, "connection", "error")
        raise BadEnvironmentError(f"{self._where} sent an unexpected message: {excerpt(heard)}")

    def _raise_error(self, data: JsonObject, kind: str) -> Never:
        code, message = data.get("code"), excerpt(str(data.get("message")))
        said = f"{self._where} answered a {kind} with the error {code}: {message}"
        if code == "CAPACITY_REACHED":
            most = data.get("max_sessions")
            raise NoPlaceError(
                f"{said}; lower max_workers or raise max_concurrent_envs of the server",
                most if isinstance(most, int) else None,
            )
        if code in _BROKEN:
            raise InfrastructureError(said)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise RefusedActionError(f"Invalid action: {_reasons(data.get('errors')) or message}")
        raise BadEnvironmentError(f"{said} {_reasons(data.get('errors'))}".rstrip())

    def _broke(self, how: str) -> InfrastructureError:
        return InfrastructureError(
            f"the connection to {self._where} broke ({how}): check whether the server is still running"
        )


async def _refuse_redirect(
    session: aiohttp.ClientSession, context: object, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    target = redirect.response.headers.get("location", "elsewhere")
    raise BadEnvironmentError(
        f"{redirect.url} redirects to {excerpt(target)}, which is not followed: set the server's own address"
    )


def _reasons(errors: JsonValue) -> str:
    """The first of pydantic's errors as text: ``action: Input should be 'UP' or 'DOWN'``."""
    worded: list[str] = []
    for each in errors[:_MOST_REASONS] if isinstance(errors, list) else ():
        found: dict[str, Any] = each if isinstance(each, dict) else {}
        place = ".".join(str(step) for step in found.get("loc") or ())
        worded.append(excerpt(f"{place}: {found.get('msg')}" if place else str(found.get("msg"))))
    return "; ".join(worded)
