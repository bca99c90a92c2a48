"""Requests to the model server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import httpx

from openhands_rl_plugin.session.gateway_config import GatewayConfig
from openhands_rl_plugin.session.replies import JSON, ErrorReply, Reply, error_reply
from openhands_rl_plugin.session.upstream import ALL_FIELDS, HttpUpstream, PlainTransport, http_client

# Hop-by-hop headers, keys and cookies for the gateway, and those that the HTTP client sets itself.
_OWN = frozenset(
    b"accept-encoding api-key authorization connection content-encoding content-length cookie expect host keep-alive"
    b" proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade x-api-key"
    b" x-goog-api-key".split()
)
_NOT_PASSED_BACK = {name.decode() for name in _OWN} | {"content-type", "date", "server"}
_KEY_HEADERS = (b"api-key", b"authorization", b"x-api-key", b"x-goog-api-key")
MAX_ANSWER = 256 * 1024**2
_WAITS = {"timeout": {"connect": 10.0}}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


RawHeaders = Sequence[tuple[bytes, bytes]]
"""The headers of a request as they came, with lower-case names."""


class ModelServer:
    """The model server behind the gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._base = config.upstream
        self._key = config.upstream_key().encode()
        self._anthropic = (urlsplit(config.upstream).hostname or "").endswith("anthropic.com")
        self._keeps_client_key = not config.access().key
        self._timeout = config.timeout
        if self._base.startswith("https:"):
            client = http_client(secure=True)
            self._send, self.aclose = partial(client.send, stream=True), client.aclose
        else:
            # What a client has beside its transport (cookies, redirects) is not wanted here, and costs time.
            transport = PlainTransport()
            self._send, self.aclose = transport.handle_async_request, transport.aclose

    async def whole(self, response: httpx.Response) -> Reply:
        """The rest of an open response. Raises ``ErrorReply`` when it is too long."""
        return Reply(
            status=response.status_code,
            body=b"".join([part async for part in self.parts(response)]),
            content_type=response.headers.get("content-type", JSON),
            headers=forwarded_headers(response.headers),
        )

    async def parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises ``ErrorReply`` when it is too long."""
        size = 0
        async for part in response.aiter_bytes():
            size += len(part)
            if size > MAX_ANSWER:
                message = f"The response of the model server exceeds {MAX_ANSWER} bytes."
                raise ErrorReply(error_reply(502, message, "BadGatewayError"))
            yield part

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, headers: RawHeaders, body: bytes, *, content_type: bytes = b""
    ) -> AsyncIterator[httpx.Response]:
        """An open response, to be streamed; ``path`` is below ``/v1``, with its query. Raises ``ErrorReply``."""
        sent = self._headers(headers, path, content_type)
        request = httpx.Request(method, f"{self._base}/{path}", content=body or None, headers=sent, extensions=_WAITS)
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._send(request)
                try:
                    if response.status_code in _REDIRECTS:
                        # A client that followed it would leave the gateway, with its messages.
                        where = urlsplit(response.headers.get("location", "")).netloc[:200] or "another path"
                        raise ErrorReply(_bad(f"redirects to {where!a}: set --upstream to where it is.", self._base))
                    yield response
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException) as error:
            message = f"The model server at {self._base} did not answer within {self._timeout:g} s."
            raise ErrorReply(error_reply(504, message, "GatewayTimeoutError")) from error
        except httpx.ConnectError as error:
            message = f"No model server answers at {self._base} ({type(error).__name__}): start it or set --upstream."
            raise ErrorReply(error_reply(502, message, "BadGatewayError")) from error
        except httpx.HTTPError as error:
            raise ErrorReply(_bad(f"sent no complete answer ({type(error).__name__}).", self._base)) from error

    def for_strategies(self, headers: RawHeaders) -> HttpUpstream:
        """The same server for the requests of a strategy; ``headers`` are those of the client."""
        key = self._key.decode()
        if not key and self._keeps_client_key:
            key = dict(headers).get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        return HttpUpstream(self._base, key or None, self._timeout, fields=ALL_FIELDS)

    def _headers(self, given: RawHeaders, path: str, content_type: bytes) -> list[tuple[bytes, bytes]]:
        own = _OWN | {b"content-type"} if content_type else _OWN
        sent = [each for each in given if each[0] not in own]
        sent.append((b"accept-encoding", b"identity"))
        if content_type:
            sent.append((b"content-type", content_type))
        if self._key:
            # Anthropic takes a bearer token for another kind of key; vLLM and others know no other header.
            if not self._anthropic:
                sent.append((b"authorization", b"Bearer " + self._key))
            if self._anthropic or path.startswith("messages"):
                sent.append((b"x-api-key", self._key))
        elif self._keeps_client_key:
            sent += [each for each in given if each[0] in _KEY_HEADERS]
        return sent


def _bad(problem: str, base: str) -> Reply:
    return error_reply(502, f"The model server at {base} {problem}", "BadGatewayError")


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a response that are forwarded to the client, such as ``retry-after``."""
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_BACK}
