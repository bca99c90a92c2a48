"""Takes token ids and logprobs out of an answer before litellm reads it.

litellm parses, checks, copies and logs whatever an answer holds, and 35,000 prompt ids cost it several milliseconds
a call. So they are taken out of the body as it comes from the model server; what litellm and OpenHands get is the
answer that they would have got without asking for ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import httpx
from openai import OpenAI

from openhands_rl_plugin.core.types import Tokens
from openhands_rl_plugin.models.gateway.answers import ChatAnswer
from openhands_rl_plugin.models.gateway.calls import Unrecordable
from openhands_rl_plugin.models.gateway.idtext import KnownContexts

_CLIENTS = 16


class Tap:
    """What the first answer gave away: ``tokens`` of its first choice, and ``left``, the body that litellm got.

    Both are ``None`` when none came this way. ``after``: see ``KnownContexts.tokens``.
    """

    def __init__(self, contexts: KnownContexts, after: Tokens | None = None) -> None:
        self._contexts = contexts
        self._after = after
        self.tokens: Tokens | None = None
        self.left: bytes | None = None

    def take(self, body: bytes) -> bytes:
        """What is left for litellm: all of it where there are not both kinds of ids, so that nothing odd is lost."""
        try:
            answer = ChatAnswer(body)
        except Unrecordable:
            return body
        choice = answer.choices[0]
        if choice.prompt is None:
            return body
        tokens = self._contexts.tokens(choice.prompt, choice.sampled, choice.logprobs, self._after)
        if tokens is None:
            return body
        self.tokens, self.left = tokens, answer.plain_body()
        return self.left


_TAP: ContextVar[Tap | None] = ContextVar("rl_answer_tap", default=None)


@contextmanager
def tapping(contexts: KnownContexts, after: Tokens | None = None) -> Iterator[Tap]:
    """Answers that come through ``tapped_client`` in this context go by the tap."""
    tap = Tap(contexts, after)
    token = _TAP.set(tap)
    try:
        yield tap
    finally:
        _TAP.reset(token)


def tapped_client(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The ``client`` argument for litellm, or nothing where its own client has to do: for TLS, and without a key."""
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
    return httpx.Client(follow_redirects=True, limits=limits, event_hooks={"response": [_divert]})


def _divert(response: httpx.Response) -> None:
    tap = _TAP.get()
    is_json = response.headers.get("content-type", "").startswith("application/json")
    if tap is not None and response.status_code == 200 and is_json and "content-encoding" not in response.headers:
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Diverted(response.stream, tap)


class _Diverted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, tap: Tap) -> None:
        self._stream = stream
        self._tap = tap

    def __iter__(self) -> Iterator[bytes]:
        yield self._tap.take(b"".join(self._stream))

    def close(self) -> None:
        self._stream.close()
