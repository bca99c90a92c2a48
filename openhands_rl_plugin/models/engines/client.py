"""The client of model servers: requests, the errors of their answers, and when a request is sent again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit

import h11
import httpx

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import EpisodeError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import error_in
from openhands_rl_plugin.core.secrets import SHORTEST_OWN
from openhands_rl_plugin.models.engines.extensions import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    ExtensionAttempt,
    ExtensionTable,
)
from openhands_rl_plugin.models.engines.openai_wire import Json, dump_object, parse_object

ALL_FIELDS = (TOKEN_IDS, LOGPROBS, SAMPLING)
"""The extensions that a server of the user's own is asked for."""

RawHeaders = Sequence[tuple[bytes, bytes]]
"""The headers of a request as they are sent, with lower-case names."""

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
_PAUSES = Backoff(0.5, 8.0)
# Seconds that a server may ask to wait (Retry-After).
_LONGEST_PAUSE = 60.0
_READ_BYTES, _LONGEST_HEAD = 2**20, 100 * 1024
_CONNECT_SECONDS, _IDLE_SECONDS = 10.0, 5.0
MAX_ANSWER, _LONGEST_MESSAGE = 256 * 1024 * 1024, 2000


class ServerError(Exception):
    """The server answered an error, or not at all: ``status`` is that of HTTP, 408 where it was too slow, and 500 where
    there is no connection. ``body`` and ``headers`` are what it sent, ``headers`` ``None`` for nothing. With a status
    of 200 the answer had no choice."""

    def __init__(self, status: int, message: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.body, self.headers = status, body or message.encode(), headers

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return not 400 <= self.status < 500 or self.status in _WORTH_A_RETRY

    @property
    def retry_after(self) -> float:
        """The seconds that the server asks to wait, or 0."""
        waits = (self.headers or {}).get("retry-after", "")
        return float(waits) if waits.isascii() and waits.isdecimal() else 0.0  # a date is rare

    def as_failure(self, attempts: int = 1) -> EpisodeError:
        """``ModelError`` when the server refuses the request itself, else ``InfrastructureError``."""
        tried = f" (after {attempts} attempts)" if attempts > 1 else ""
        return (InfrastructureError if self.is_temporary else ModelError)(f"{self}{tried}")


def server_error(caught: BaseException) -> ServerError | None:
    """The model server's error that was the cause."""
    error: BaseException | None = caught
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__
    return error


@lru_cache(16)
def extensions_of(base_url: str) -> ExtensionTable:
    """What the models of one server accept; shared by all sessions of the process."""
    return ExtensionTable()


_url = lru_cache(256)(httpx.URL)
JSON = (b"content-type", b"application/json")


class _Connection(httpx.AsyncByteStream):
    """A connection to a plain HTTP server, and the body of the response on it. ``idle``: those to use again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: list[_Connection]) -> None:
        self._reader, self._writer, self._idle = reader, writer, idle
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        self._used = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent: nothing came in since the response, neither an end nor a late error."""
        unread = cast(Any, self._reader)._buffer or self._state.trailing_data[0]
        is_open = not (unread or self._reader.at_eof() or self._writer.is_closing())
        return is_open and time.monotonic() - self._used < _IDLE_SECONDS

    async def ask(self, request: httpx.Request) -> httpx.Response:
        """Send the request; returns the response with its body unread. Raises ``httpx.HTTPError``."""
        try:
            head = await self._event(
                h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw),
                h11.Data(request.content),
                h11.EndOfMessage(),
            )
            while isinstance(head, h11.InformationalResponse):
                head = await self._event()
        except BaseException:
            self.close()
            raise
        return httpx.Response(head.status_code, headers=[*head.headers], stream=self)

    async def _event(self, *sent: h11.Event) -> Any:
        """The next event of the response, after ``sent``."""
        try:
            if sent:  # in one piece: its parts would wait for each other
                self._writer.write(b"".join(self._state.send(part) or b"" for part in sent))
            while (event := self._state.next_event()) is h11.NEED_DATA:
                self._state.receive_data(await self._reader.read(_READ_BYTES))
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        except h11.ProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        return event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._event(), h11.Data):
            yield event.data

    async def aclose(self) -> None:
        """Keep it for the next request; one in the middle of a response is closed."""
        if self._state.our_state is self._state.their_state is h11.DONE:
            self._state.start_next_cycle()
            self._used = time.monotonic()
            if self._idle and not self._idle[0].is_usable:  # the newest is used first
                self._idle.pop(0).close()
            self._idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        """End it."""
        self._writer.close()


class _PlainServer:
    """A server without https, asked over asyncio's own sockets for a third of the processor time of httpx's."""

    def __init__(self) -> None:
        self._idle: list[_Connection] = []

    async def send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        """As that of ``httpx.AsyncClient``, whose cookies, proxies and redirects are not wanted here."""
        while self._idle:
            if (known := self._idle.pop()).is_usable:
                return await known.ask(request)
            known.close()
        host, port = request.url.host, request.url.port or 80
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host, port, limit=_READ_BYTES)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return await _Connection(reader, writer, self._idle).ask(request)

    async def aclose(self) -> None:
        """Close what is idle."""
        for known in self._idle:
            known.close()


Connections = dict[tuple[asyncio.AbstractEventLoop, tuple[str, str]], httpx.AsyncClient | _PlainServer]
"""Open ones by event loop and server."""
_SHARED: Connections = {}


async def close_connections(connections: Connections = _SHARED) -> None:
    """Close those of this event loop."""
    for at in [each for each in connections if each[0] is asyncio.get_running_loop()]:
        await connections.pop(at).aclose()


async def is_sent_again(
    error: ServerError, asking: ExtensionAttempt, tries: int = 1, pauses: Backoff = _PAUSES
) -> bool:
    """Whether to repeat a request: without the fields that the server refuses, or after a pause, which this waits."""
    if asking.is_refused(error.status, error.body):
        return True
    asking.failures += 1
    if not error.is_temporary or error.status == 200 or asking.failures >= tries:
        return False
    await asyncio.sleep(max(pauses.pause(asking.failures), min(error.retry_after, _LONGEST_PAUSE)))
    return True


class HttpUpstream:
    """A server with an API like OpenAI's. ``timeout``: seconds of a request, from the connection to the last byte.

    ``fields``: the extensions to ask for. ``connections``: by default those of all such servers of the process.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None,
        timeout: float,
        *,
        fields: tuple[str, ...] = (),
        headers: Mapping[str, str] | RawHeaders | None = None,
        connections: Connections = _SHARED,
    ) -> None:
        self.fields = fields
        self.extensions = extensions_of(base_url)
        self._base = base_url.rstrip("/")
        self._timeout = timeout
        self._key = key.encode() if key else b""
        self._headers = [*httpx.Headers(headers).raw, JSON]
        self._connections = connections
        url = urlsplit(base_url)
        self._origin = url[:2]
        # Anthropic takes a bearer token for another kind of key; vLLM and others know no other header.
        self._anthropic = (url.hostname or "").endswith("anthropic.com")

    async def send(self, body: Json) -> bytes:
        """The body of the answer to a chat completion's request. Raises ``ServerError``."""
        async with self.post(body) as response:
            return await self.completion(response)

    def post(self, body: Json) -> AbstractAsyncContextManager[httpx.Response]:
        """``open`` for a chat completion."""
        return self.open("POST", "chat/completions", self._headers, dump_object(body))

    async def completion(self, response: httpx.Response) -> bytes:
        """The body of an open response. Raises ``ServerError``, also for an error in it."""
        answer = await whole(response)
        found = error_in(parse_object(answer)) if b'"error"' in answer or b'"choices"' not in answer else None
        if found is not None:
            raise self.error(found[0], answer, response.headers)
        return answer

    @asynccontextmanager
    async def open(self, method: str, path: str, headers: RawHeaders, body: bytes) -> AsyncIterator[httpx.Response]:
        """An open response, to be read by ``parts``; ``path`` is below ``/v1``. Raises ``ServerError``, also in the
        block."""
        keys = [] if self._anthropic or not self._key else [(b"authorization", b"Bearer " + self._key)]
        if self._key and (self._anthropic or path.startswith("messages")):
            keys.append((b"x-api-key", self._key))
        sent = httpx.Request(method, _url(f"{self._base}/{path}"), content=body or None, headers=[*headers, *keys])
        server, at = f"model server at {self._base}", (asyncio.get_running_loop(), self._origin)
        if at not in self._connections:  # a plain HTTP server is local, and asked without a proxy
            waits, many = httpx.Timeout(None, connect=_CONNECT_SECONDS), httpx.Limits()
            secure = self._origin[0] == "https"
            self._connections[at] = httpx.AsyncClient(timeout=waits, limits=many) if secure else _PlainServer()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._connections[at].send(sent, stream=True)
                try:
                    if response.has_redirect_location:
                        # A client that followed it would leave with its messages.
                        other = urlsplit(response.headers["location"]).netloc[:200] or "another path"
                        remedy = "set --upstream or base_url to where it is"
                        raise ServerError(421, f"The {server} redirects to {other!a}: {remedy}.")
                    if response.is_error:
                        raise self.error(response.status_code, await whole(response), response.headers)
                    yield response
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException) as error:
            problem = f"Request timed out: the {server} did not answer within {self._timeout:g} s."
            raise ServerError(408, problem) from error
        except httpx.HTTPError as error:
            problem = f"the {server} broke off; ask again."
            if isinstance(error, httpx.ConnectError):
                problem = f"no model server answers at {self._base} ({error!s:.100}): start it, for example with "
                problem += "`openhands-rl serve`."
            raise ServerError(500, f"Connection error ({type(error).__name__}): {problem}") from error

    def error(self, status: int, answer: bytes, headers: Mapping[str, str]) -> ServerError:
        """That of an answer with this body, without the key."""
        if len(self._key) >= SHORTEST_OWN:
            answer = answer.replace(self._key, b"***")  # some servers repeat it
        shown = parse_object(answer) or answer[:_LONGEST_MESSAGE].decode("utf-8", "replace")
        return ServerError(status, f"Error code: {status} - {shown}"[:_LONGEST_MESSAGE], answer, headers)


async def whole(response: httpx.Response) -> bytes:
    """The rest of an open response. Raises ``ServerError`` when it is too long."""
    return b"".join([part async for part in parts(response)])


async def parts(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises ``ServerError`` when it is too long."""
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_ANSWER:
            raise ServerError(413, f"The response of the model server exceeds {MAX_ANSWER} bytes.")
        yield part
