"""Requests to the model server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from openhands_rl_plugin.session.gateway_config import GatewayConfig
from openhands_rl_plugin.session.replies import JSON, Reply, error_reply

# Hop-by-hop headers, keys and cookies for the gateway, and those that the HTTP client sets itself.
_OWN = frozenset(
    {
        "accept-encoding",
        "api-key",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "cookie",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
        "x-goog-api-key",
    }
)
_NOT_PASSED_BACK = _OWN | {"content-type", "date", "server"}
_KEY_HEADERS = ("api-key", "authorization", "x-api-key", "x-goog-api-key")
_CONNECT_SECONDS = 10.0
_READ_BUFFER = 2**20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class UpstreamError(Exception):
    """The model server did not respond; ``reply`` is the error for the client."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


class ModelServer:
    """The model server behind the gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._base = config.upstream
        self._key = config.upstream_key()
        self._anthropic = (URL(config.upstream).host or "").endswith("anthropic.com")
        self._keeps_client_key = not config.access().key
        self._longest = config.max_answer_bytes
        self._timeout = config.timeout
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """The complete response. Raises ``UpstreamError`` when there is none."""
        async with self.exchange("POST", path, headers, body, content_type=JSON) as response:
            return await self.whole(response)

    async def whole(self, response: aiohttp.ClientResponse) -> Reply:
        """The rest of an open response. Raises ``UpstreamError`` when it is too long."""
        return Reply(
            status=response.status,
            body=b"".join([part async for part in self.parts(response)]),
            content_type=response.headers.get("content-type", JSON),
            headers=forwarded_headers(response.headers),
        )

    async def parts(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises ``UpstreamError`` when it is too long."""
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._longest:
                message = f"The response of the model server exceeds {self._longest} bytes; raise --max-answer-bytes."
                raise UpstreamError(error_reply(502, message, "BadGatewayError"))
            yield part

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, *, content_type: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An open response, to be streamed; ``path`` is below ``/v1``, with its query. Raises ``UpstreamError``."""
        sent = self._headers(headers, path)
        if content_type is not None:
            sent["content-type"] = content_type
        url = URL(f"{self._base}/{path}", encoded=True)
        try:
            async with self._client().request(
                method, url, data=body or None, headers=sent, allow_redirects=False
            ) as response:
                if response.status in _REDIRECTS:
                    # A client that followed it would leave the gateway, with its messages.
                    where = urlsplit(response.headers.get("location", "")).netloc[:200] or "another path"
                    message = f"The model server at {self._base} redirects to {where!a}: set --upstream to where it is."
                    raise UpstreamError(error_reply(502, message, "BadGatewayError"))
                yield response
        except TimeoutError as error:
            message = f"The model server at {self._base} did not answer within {self._timeout:g} s."
            raise UpstreamError(error_reply(504, message, "GatewayTimeoutError")) from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            message = f"The model server at {self._base} sent no complete answer ({type(error).__name__})."
            raise UpstreamError(error_reply(502, message, "BadGatewayError")) from error
        except aiohttp.ClientError as error:
            message = f"No model server answers at {self._base} ({type(error).__name__}): start it or set --upstream."
            raise UpstreamError(error_reply(502, message, "BadGatewayError")) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            secure = self._base.startswith("https:")
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=_CONNECT_SECONDS),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BUFFER,
                # A plain HTTP server is local: no proxy.
                trust_env=secure,
            )
        return self._session

    def _headers(self, given: Mapping[str, str], path: str) -> CIMultiDict[str]:
        sent = CIMultiDict((name, value) for name, value in given.items() if name.lower() not in _OWN)
        sent["accept-encoding"] = "identity"
        if self._key:
            # Anthropic takes a bearer token for another kind of key; vLLM and others know no other header.
            if not self._anthropic:
                sent["authorization"] = f"Bearer {self._key}"
            if self._anthropic or path.startswith("messages"):
                sent["x-api-key"] = self._key
        elif self._keeps_client_key:
            sent.update((name, given[name]) for name in _KEY_HEADERS if name in given)
        return sent


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a response that are forwarded to the client, such as ``retry-after``."""
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_BACK}
