"""The client of model servers: requests, the errors of their answers, and when a request is sent again."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import EpisodeError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, error_in
from openhands_rl_plugin.core.secrets import SHORTEST_OWN
from openhands_rl_plugin.core.types import JsonObject, Tokens
from openhands_rl_plugin.models.engines.openai_wire import LOGPROBS, TOKEN_IDS, Json, dump_object, parse_object

Response = aiohttp.ClientResponse
RawHeaders = Sequence[tuple[bytes, bytes]]
"""The headers of a request as they are sent, with lower-case names."""

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
_PAUSES = Backoff(0.5, 8.0)
# Seconds that a server may ask to wait (Retry-After).
_LONGEST_PAUSE = 60.0
_READ_BYTES, _LONGEST_HEAD = 2**20, 100 * 1024
_CONNECT_SECONDS, _IDLE_SECONDS = 10.0, 4.0  # uvicorn, and so vLLM, closes an idle one after five
MAX_ANSWER, _LONGEST_MESSAGE = 256 * 1024 * 1024, 2000

EXTENSIONS: JsonObject = {TOKEN_IDS: True, LOGPROBS: True, **NEUTRAL_PARAMETERS}
"""What is sent beyond OpenAI's protocol, as vLLM, SGLang and ``serve`` accept it. Hosted APIs may refuse it."""
_REFUSABLE = (*EXTENSIONS, "stream_options")


class Upstream(Protocol):
    """A source of answers. ``extensions``: the fields that may be added to a request; none after a ``refusal``."""

    extensions: JsonObject
    refusal: str

    async def send(self, body: Json) -> bytes:
        """The body of the answer. Raises ``ServerError``."""
        ...


class Attempts:
    """The attempts at one request. ``failures``: how many failed, those aside that the server refused because of the
    ``extensions``; such a request is sent once more without them."""

    def __init__(self, server: Upstream, *, extended: bool = True, tries: int = 1, pauses: Backoff = _PAUSES) -> None:
        self.extended = extended and bool(server.extensions)
        self.failures = 0
        self._server, self._refusal, self._tries, self._pauses = server, server.refusal, tries, pauses

    async def answered[T](self, send: Callable[[], Awaitable[T]]) -> T:
        """The result of ``send``, which sends the request with the extensions where they are ``extended``. It is called
        again after a refusal, and after a pause where its error is temporary. Raises ``ServerError``."""
        while True:
            try:
                result = await send()
            except ServerError as error:
                if not await self._goes_on(error):
                    raise
            else:
                # vLLM repeats the request, and so the names of all fields, in any error.
                if self._refusal and not self._server.refusal:
                    self._server.extensions, self._server.refusal = {}, self._refusal
                return result

    async def _goes_on(self, error: ServerError) -> bool:
        text = error.body.decode("utf-8", "replace").lower()
        named = next((name for name in _REFUSABLE if name in text), None) if error.status in (400, 422) else None
        if self.extended and named:
            self.extended, self._refusal = False, f"the model server refuses {named} with status {error.status}"
            return True
        self.failures += 1
        if not error.is_temporary or error.status == 200 or self.failures >= self._tries:
            return False
        await asyncio.sleep(max(self._pauses.pause(self.failures), min(error.retry_after, _LONGEST_PAUSE)))
        return True

    def why_missing(self, name: str) -> str:
        """Why an answer came without what the extension ``name`` asks for."""
        return self._refusal or f"the model server ignores {name}"


def missing_parts(why: Callable[[str], str], tokens: Tokens | None) -> JsonObject:
    """What training needs and an answer lacks, each with its cause, ``why`` for an extension: as under ``MISSING``."""
    if tokens is None:
        return {"token_ids": why(TOKEN_IDS)}
    if tokens.sampled_ids and not tokens.logprobs:
        return {"logprobs": why(LOGPROBS)}
    return {}


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


JSON = (b"content-type", b"application/json")
Connections = dict[tuple[asyncio.AbstractEventLoop, str], aiohttp.ClientSession]
"""Open ones by event loop and server."""
_SHARED: Connections = {}


class _Connector(aiohttp.TCPConnector):
    """Uses no idle connection on which something came in since its response: it would answer another request."""

    async def connect(self, *asked: Any, **options: Any) -> aiohttp.connector.Connection:
        while (found := await super().connect(*asked, **options)).protocol is not None and found.protocol.should_close:
            found.close()
        return found


def _connected(connections: Connections, scheme: str, origin: str) -> aiohttp.ClientSession:
    """The session of this event loop for a server. It adds no header, follows no redirect and keeps no cookie."""
    at = (asyncio.get_running_loop(), origin)
    if (known := connections.get(at)) is None:
        known = connections[at] = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            max_field_size=_LONGEST_HEAD,
            read_bufsize=_READ_BYTES,
            trust_env=scheme == "https",  # a plain HTTP server is local, and asked without a proxy
        )
    return known


async def close_connections(connections: Connections = _SHARED) -> None:
    """Close those of this event loop."""
    for at in [each for each in connections if each[0] is asyncio.get_running_loop()]:
        await connections.pop(at).close()


@atexit.register
def _close_all() -> None:
    for (loop, _), client in _SHARED.items():
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(client.close(), loop).result(1.0)


class HttpUpstream:
    """A server with an API like OpenAI's. ``timeout``: seconds of a request, from the connection to the last byte.

    ``extended``: whether requests may have ``EXTENSIONS``. ``connections``: by default those of all such servers of the
    process.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None,
        timeout: float,
        *,
        extended: bool = False,
        headers: Mapping[str, str] | RawHeaders | None = None,
        connections: Connections = _SHARED,
    ) -> None:
        self.extensions: JsonObject = EXTENSIONS if extended else {}
        self.refusal = ""
        self._base = base_url.rstrip("/")
        self._timeout = timeout
        self._key = key.encode() if key else b""
        given = headers.items() if isinstance(headers, Mapping) else ()
        own = ((name.lower().encode(), value.encode()) for name, value in given)
        self._headers = [*own, *(() if isinstance(headers, Mapping) else headers or ()), JSON]
        self._connections = connections
        url = urlsplit(base_url)
        self._scheme, self._origin = url.scheme, f"{url.scheme}://{url.netloc}"
        # Anthropic takes a bearer token for another kind of key; vLLM and others know no other header.
        self._anthropic = (url.hostname or "").endswith("anthropic.com")

    async def send(self, body: Json) -> bytes:
        """The body of the answer to a chat completion's request. Raises ``ServerError``."""
        async with self.post(body) as response:
            return await self.completion(response)

    def post(self, body: Json) -> AbstractAsyncContextManager[Response]:
        """``open`` for a chat completion."""
        return self.open("POST", "chat/completions", self._headers, dump_object(body))

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of an answer; ``GET`` without a body. Raises ``ServerError``."""
        method, content = ("GET", b"") if body is None else ("POST", dump_object(body))
        async with self.open(method, path, (JSON,), content) as response:
            return await whole(response)

    async def completion(self, response: Response) -> bytes:
        """The body of an open response. Raises ``ServerError``, also for an error in it."""
        answer = await whole(response)
        found = error_in(parse_object(answer)) if b'"error"' in answer or b'"choices"' not in answer else None
        if found is not None:
            raise self.error(found[0], answer, response.headers)
        return answer

    @asynccontextmanager
    async def open(self, method: str, path: str, headers: RawHeaders, body: bytes) -> AsyncIterator[Response]:
        """An open response, to be read by ``parts``; ``path`` is below ``/v1``. Raises ``ServerError``, also in the
        block."""
        keys = [] if self._anthropic or not self._key else [(b"authorization", b"Bearer " + self._key)]
        if self._key and (self._anthropic or path.startswith("messages")):
            keys.append((b"x-api-key", self._key))
        sent = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in (*headers, *keys))
        server, client = f"model server at {self._base}", _connected(self._connections, self._scheme, self._origin)
        try:
            async with (
                asyncio.timeout(self._timeout),
                client.request(
                    method,
                    URL(f"{self._base}/{path}", encoded=True),
                    data=body or None,
                    headers=sent,
                    allow_redirects=False,
                ) as response,
            ):
                if 300 <= response.status < 400 and "location" in response.headers:
                    # A client that followed it would leave with its messages.
                    other = urlsplit(response.headers["location"]).netloc[:200] or "another path"
                    remedy = "set --upstream or base_url to where it is"
                    raise ServerError(421, f"The {server} redirects to {other!a}: {remedy}.")
                if response.status >= 400:
                    raise self.error(response.status, await whole(response), response.headers)
                yield response
        except TimeoutError as error:
            problem = f"Request timed out: the {server} did not answer within {self._timeout:g} s."
            raise ServerError(408, problem) from error
        except (aiohttp.ClientError, OSError) as error:
            problem = f"the {server} broke off; ask again."
            if isinstance(error, aiohttp.ClientConnectorError):
                problem = f"no model server answers at {self._base} ({error!s:.100}): start it, for example with "
                problem += "`openhands-rl serve`."
            raise ServerError(500, f"Connection error: {problem}") from error

    def error(self, status: int, answer: bytes, headers: Mapping[str, str]) -> ServerError:
        """That of an answer with this body, without the key."""
        if len(self._key) >= SHORTEST_OWN:
            answer = answer.replace(self._key, b"***")  # some servers repeat it
        shown = parse_object(answer) or answer[:_LONGEST_MESSAGE].decode("utf-8", "replace")
        return ServerError(status, f"Error code: {status} - {shown}"[:_LONGEST_MESSAGE], answer, headers)


async def whole(response: Response) -> bytes:
    """The rest of an open response. Raises ``ServerError`` when it is too long."""
    return b"".join([part async for part in parts(response)])


async def parts(response: Response) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises ``ServerError`` when it is too long."""
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER:
            raise ServerError(413, f"The response of the model server exceeds {MAX_ANSWER} bytes.")
        yield part
