"""Takes token ids and logprobs out of a response before litellm reads it.

litellm parses, validates, copies and logs the whole response, and 35,000 prompt ids cost it several milliseconds a
call. So they are removed from the body of the model server's response. litellm and OpenHands get the response that they
would get without a request for ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import httpx
from openai import OpenAI

from openhands_rl_plugin.core.concurrency import bound
from openhands_rl_plugin.core.types import Tokens
from openhands_rl_plugin.models.gateway.requests import Unrecordable
from openhands_rl_plugin.models.gateway.responses import UpstreamResponse
from openhands_rl_plugin.models.gateway.token_id_text import ContextCache

# Model servers of one process. A client that is dropped from the cache costs only a new connection.
_CLIENTS = 16


class TokenInterceptor:
    """``tokens`` of the first choice of the first response, and ``rest``, the body that litellm receives.

    Both are ``None`` when no response was intercepted. ``after``: see ``ContextCache.tokens``.
    """

    def __init__(self, contexts: ContextCache, after: Tokens | None = None) -> None:
        self._contexts = contexts
        self._after = after
        self.tokens: Tokens | None = None
        self.rest: bytes | None = None

    def take(self, body: bytes) -> bytes:
        """The body for litellm, unchanged unless it has prompt ids and sampled ids."""
        try:
            answer = UpstreamResponse(body)
        except Unrecordable:
            return body
        choice = answer.choices[0]
        if choice.prompt is None:
            return body
        tokens = self._contexts.tokens(choice.prompt, choice.sampled, choice.logprobs, self._after)
        if tokens is None:
            return body
        self.tokens, self.rest = tokens, answer.plain_body()
        return self.rest


_INTERCEPTOR: ContextVar[TokenInterceptor | None] = ContextVar("rl_token_interceptor", default=None)


def intercepting(contexts: ContextCache, after: Tokens | None = None) -> AbstractContextManager[TokenInterceptor]:
    """Responses that come through ``intercepting_client`` in this context pass the interceptor."""
    return bound(_INTERCEPTOR, TokenInterceptor(contexts, after))


def intercepting_client(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The ``client`` argument for litellm; empty where litellm needs its own client: for TLS, and without a key."""
    base_url, key = asked.get("base_url") or asked.get("api_base") or "", asked.get("api_key")
    plain = base_url.startswith("http://") and not (asked.get("client") or asked.get("stream"))
    return {"client": _client(base_url, key)} if plain and isinstance(key, str) and key else {}


@lru_cache(_CLIENTS)
def _client(base_url: str, key: str) -> OpenAI:
    # litellm sets the organisation and the number of retries, and gives the time limit with each call.
    return OpenAI(base_url=base_url, api_key=key, http_client=_connections())


@cache
def _connections() -> httpx.Client:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.Client(follow_redirects=True, limits=limits, event_hooks={"response": [_intercept]})


def _intercept(response: httpx.Response) -> None:
    interceptor = _INTERCEPTOR.get()
    is_json = response.headers.get("content-type", "").startswith("application/json")
    if (
        interceptor is not None
        and response.status_code == 200
        and is_json
        and "content-encoding" not in response.headers
    ):
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _InterceptedStream(response.stream, interceptor)


class _InterceptedStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, interceptor: TokenInterceptor) -> None:
        self._stream = stream
        self._interceptor = interceptor

    def __iter__(self) -> Iterator[bytes]:
        yield self._interceptor.take(b"".join(self._stream))

    def close(self) -> None:
        self._stream.close()
