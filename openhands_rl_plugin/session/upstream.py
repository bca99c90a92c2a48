"""The model behind a session: a server, or an engine in this process. It takes a request and returns the answer."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import httpcore
import httpx

from openhands_rl_plugin.config.build import make_engine
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.concurrency import LoopThread, background
from openhands_rl_plugin.core.errors import EpisodeError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import error_in, reasoning_in, sampling_in, to_message, to_wire, usage_to_wire
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.secrets import SHORTEST_OWN
from openhands_rl_plugin.models.engines.extensions import LOGPROBS, SAMPLING, TOKEN_IDS, ExtensionTable
from openhands_rl_plugin.session.token_ids import PROMPT_IDS, SAMPLED_IDS
from openhands_rl_plugin.session.wire import Json, dump_object, parse_object

ALL_FIELDS = (TOKEN_IDS, LOGPROBS, SAMPLING)
"""The extensions that a server of the user's own is asked for."""

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
_READ_BYTES = 2**20
_MAX_BODY, _LONGEST_MESSAGE = 256 * 1024 * 1024, 2000


class ServerError(Exception):
    """The server answered an error, or not at all: ``status`` is that of HTTP, 408 where it was too slow, and 500 where
    no connection was made. ``body`` is what it sent. With a status of 200 the answer had no choice.
    ``retry_after``: the seconds that it asks to wait, or 0."""

    def __init__(self, status: int, message: str, body: bytes = b"", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.body, self.retry_after = status, body or message.encode(), retry_after

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return not 400 <= self.status < 500 or self.status in _WORTH_A_RETRY

    def as_failure(self) -> EpisodeError:
        """``ModelError`` when the server refuses the request itself, else ``InfrastructureError``."""
        return (InfrastructureError if self.is_temporary else ModelError)(str(self))


def server_error(caught: BaseException) -> ServerError | None:
    """The model server's error that was the cause."""
    error: BaseException | None = caught
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__
    return error


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


class _Stream(httpcore.AsyncNetworkStream):
    """A connection of asyncio. What is written leaves in one piece when the answer is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unsent: list[bytes] = []

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            if self._unsent:
                unsent, self._unsent = self._unsent, []
                self._writer.write(b"".join(unsent))
                await self._writer.drain()
            return await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise httpcore.ReadError(error) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unsent.append(buffer)

    async def aclose(self) -> None:
        self._writer.close()

    def get_extra_info(self, info: str) -> Any:
        # An idle connection on which something came (its end) is not used again.
        return self._reader.at_eof() or self._writer.is_closing() if info == "is_readable" else None


class _Sockets(httpcore.AsyncNetworkBackend):
    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: Any = None, socket_options: Any = None
    ) -> _Stream:
        try:
            async with asyncio.timeout(timeout):
                return _Stream(*await asyncio.open_connection(host, port, limit=_READ_BYTES))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(error) from error
        except OSError as error:
            raise httpcore.ConnectError(error) from error


class PlainTransport(httpx.AsyncHTTPTransport):
    """That of httpx over asyncio's own sockets, which takes half of the processor time of anyio's."""

    def __init__(self) -> None:
        super().__init__(verify=False)
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=100, keepalive_expiry=5.0, network_backend=_Sockets()
        )


def http_client(*, secure: bool) -> httpx.AsyncClient:
    """A client for a model server, for one event loop. A plain HTTP server is local: no proxy."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    transport = None if secure else PlainTransport()
    return httpx.AsyncClient(verify=secure, trust_env=secure, limits=limits, timeout=None, transport=transport)


@lru_cache(4)
def _client(loop: LoopThread, secure: bool) -> httpx.AsyncClient:
    """One for all sessions; it belongs to the background loop."""
    return http_client(secure=secure)


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
        self._key = key.encode() if key and len(key) >= SHORTEST_OWN else b""
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._headers |= headers or {}

    async def send(self, body: Json) -> bytes:
        """As ``Upstream.send``."""
        client = _client(background(), self._url.startswith("https:"))
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout),
                client.stream(
                    "POST", self._url, content=dump_object(body), headers=self._headers, follow_redirects=True
                ) as response,
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
            found = error_in(parse_object(answer)) if b'"error"' in answer or b'"choices"' not in answer else None
            if found is None:
                return answer
            status = found[0]
        answer = answer.replace(self._key, b"***") if self._key else answer  # some servers repeat it
        told = parse_object(answer) or answer[:_LONGEST_MESSAGE].decode("utf-8", "replace")
        waits = response.headers.get("retry-after", "")
        seconds = float(waits) if waits.isascii() and waits.isdecimal() else 0.0  # a date is rare
        raise ServerError(status, f"Error code: {status} - {told}"[:_LONGEST_MESSAGE], answer, seconds)


class EngineUpstream:
    """An ``Upstream`` over an ``LLMEngine``, which is used on the loop of ``background``."""

    fields = ()

    def __init__(self, engine: LLMEngine) -> None:
        self.extensions = ExtensionTable()
        self._engine = engine

    async def send(self, body: Json) -> bytes:
        """As ``Upstream.send``."""
        messages, tools = [to_message(message) for message in body["messages"]], body.get("tools") or ()
        try:
            [completion] = await self._engine.complete(messages, tools=tools, n=1, sampling=sampling_in(body))
        except EpisodeError as error:
            raise ServerError(400 if isinstance(error, ModelError) else 503, str(error)) from error
        said, tokens = to_wire(completion.message), completion.tokens
        if thought := reasoning_in(completion.metadata):
            said["reasoning_content"] = thought
        choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish_reason or "stop", "message": said}
        answer: dict[str, Any] = {
            "id": f"rl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "model": completion.policy.served_name if completion.policy else body["model"],
            "choices": [choice],
            "usage": usage_to_wire(completion.usage),
        }
        if tokens is not None:
            answer[PROMPT_IDS], choice[SAMPLED_IDS] = list(tokens.prompt_ids), list(tokens.sampled_ids)
            choice["logprobs"] = {"content": [{"token": "", "logprob": each} for each in tokens.logprobs]}
        return dump_object(answer)


_given: list[LLMEngine] = []
_made: dict[str, LLMEngine] = {}
_MOST = 16
_lock = threading.Lock()


@contextmanager
def sampling_from(engine: LLMEngine) -> Iterator[None]:
    """Until the end of the block, V1's episodes that begin in this process are sampled from ``engine``: a
    ``TransformersEngine``, say, for a model in this process. It is used on the loop of ``core.concurrency``."""
    _given.append(engine)
    try:
        yield
    finally:
        _given.remove(engine)


def upstream_in(settings: RLSettings, *, model: str, base_model: str) -> Upstream | None:
    """What samples in the place of the host's own model, for the served name ``model``; ``None`` for nothing.

    Engines are shared by the sessions of a process. Raises ``ConfigError``.
    """
    serving, url = settings.serving, settings.serving.base_url
    if _given:
        return EngineUpstream(_given[-1])
    if url and settings.engine in (AUTO, "openai") and not settings.engine_options:
        return HttpUpstream(url, serving.api_key(), serving.request_timeout, fields=ALL_FIELDS)
    if settings.engine == AUTO:
        return None
    key = "\0".join((model, base_model, settings.engine, str(settings.engine_options), serving.model_dump_json()))
    with _lock:
        if key not in _made:
            while len(_made) >= _MOST:
                del _made[next(iter(_made))]
            _made[key] = make_engine(settings, model=model, base_model=base_model, base_url=url)
        return EngineUpstream(_made[key])
