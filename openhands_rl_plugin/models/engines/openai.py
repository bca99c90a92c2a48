"""Completions from any OpenAI-compatible endpoint (vLLM, SGLang, ``openhands-rl serve``, hosted models)."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import httpx

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, ModelError
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams
from openhands_rl_plugin.models.engines.extensions import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    Clock,
    ExtensionAttempt,
    ExtensionTable,
    extension_values,
    missing_parts,
    sampling_as_sent,
)
from openhands_rl_plugin.models.engines.openai_wire import StreamedAnswer, completions_from, request_body
from openhands_rl_plugin.models.engines.seeded import merge_sampling

_RETRIED = frozenset({408, 409, 425, 429})
_LONGEST_PAUSE = 20.0
_MAX_RESPONSE_BYTES = 256 * 1024 * 1024


class OpenAIEngine:
    """``protocols.LLMEngine`` over ``POST {base_url}/chat/completions``.

    Args:
        model: the served name, for example ``policy-v000007``.
        base_url: up to and including ``/v1``.
        api_key: sent as a bearer token; never stored elsewhere, printed or logged.
        api_key_env: name of an environment variable that holds the key.
        base_model: name of the base model of an adapter; ``model`` without an adapter.
        timeout: seconds for one request.
        retries: how often a request is retried when the server is unreachable, slow or overloaded.
        backoff: seconds before the first retry; doubled each time, with jitter.
        sampling: defaults for parameters that a call does not set. Those beyond temperature and ``top_p`` that nobody
            sets are sent with their neutral values (``core.messages.NEUTRAL_PARAMETERS``), unless the server refuses.
        clock: seconds, for when a refused field is requested again.
        token_ids: whether to ask for token ids and logprobs; ``False`` for an endpoint that records them itself.

    Bound to the event loop of its first request; close it with ``aclose``.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None = None,
        base_model: str | None = None,
        timeout: float = 120.0,
        *,
        api_key_env: str | None = None,
        retries: int = 4,
        backoff: float = 0.5,
        sampling: SamplingParams | None = None,
        clock: Clock = time.monotonic,
        token_ids: bool = True,
    ) -> None:
        self.model = model
        self.base_model = base_model or model
        self.base_url = base_url.rstrip("/")
        self._timeout = timeout
        self._retries = retries
        self._backoff = Backoff(backoff, _LONGEST_PAUSE)
        self._sampling = sampling or SamplingParams()
        self._extensions = ExtensionTable(clock)
        self._tokens: tuple[str, ...] = (TOKEN_IDS, LOGPROBS) if token_ids else ()
        self._key = _api_key(api_key, api_key_env)
        self._client: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"OpenAIEngine(model={self.model!r}, base_url={self.base_url!r})"

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers. Raises ``InfrastructureError`` or ``ModelError``."""
        wanted = merge_sampling(sampling, self._sampling)
        completions: list[Completion] = []
        while len(completions) < n:
            # Some servers ignore n and return one choice; the missing ones are requested with other seeds.
            asked = _with_seed_offset(wanted, len(completions))
            body = request_body(self.model, messages, tools=tools, n=n - len(completions), sampling=asked)
            asking = self._extensions.attempt(self.model, (*self._tokens, SAMPLING))
            answer, attempts = await self._post(body, asking)
            completions += self._read(answer, asked, attempts, asking)
        return completions[:n]

    async def stream(
        self, messages: Sequence[Message], *, tools: Sequence[JsonObject] = (), sampling: SamplingParams | None = None
    ) -> AsyncIterator[str | Completion]:
        """Yields the text as it is sampled, then the completion. Raises as ``complete`` does.

        A request is retried only before its response has started.
        """
        wanted = merge_sampling(sampling, self._sampling)
        body = request_body(self.model, messages, tools=tools, n=1, sampling=wanted)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        asking = self._extensions.attempt(self.model, (*self._tokens, SAMPLING))
        async with self._opened(streamed, asking) as (response, attempts):
            try:
                if "event-stream" not in response.headers.get("content-type", ""):
                    content = await self._content(response)
                else:
                    answer, size = StreamedAnswer(), 0
                    async for data in response.aiter_bytes():
                        self._check_size(size := size + len(data))
                        for text in answer.feed(data):
                            yield text
                    content = answer.whole()
            except (TimeoutError, httpx.TransportError) as error:
                raise InfrastructureError(self._unreachable(error)) from error
        yield self._read(content, wanted, attempts, asking)[0]

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _read(
        self, content: bytes, sampling: SamplingParams, attempts: int, asking: ExtensionAttempt
    ) -> list[Completion]:
        """The completions of a response; what training needs and is missing is named in their metadata."""
        sent = sampling_as_sent(sampling, asking)
        found = completions_from(content, self.base_model, self.model, sent, attempts=attempts)
        return [
            each.model_copy(update={"metadata": {**each.metadata, MISSING: missing}})
            if self._tokens and (missing := missing_parts(asking, each.tokens))
            else each
            for each in found
        ]

    async def _post(self, body: JsonObject, asking: ExtensionAttempt) -> tuple[bytes, int]:
        """The response body of one request, and the number of attempts."""
        attempt = 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self._timeout), self._request(body, asking) as response:
                    content = await self._content(response)
            except (TimeoutError, httpx.TransportError) as error:
                await self._wait(attempt, self._unreachable(error))
            else:
                if response.is_success:
                    asking.succeeded()
                    return content, attempt
                attempt = await self._after_error(attempt, response, content, asking)

    @asynccontextmanager
    async def _opened(self, body: JsonObject, asking: ExtensionAttempt) -> AsyncIterator[tuple[httpx.Response, int]]:
        """An open response, to be streamed, and the number of attempts."""
        attempt = 0
        while True:
            attempt += 1
            async with AsyncExitStack() as stack:
                content = b""
                try:
                    async with asyncio.timeout(self._timeout):
                        response = await stack.enter_async_context(self._request(body, asking))
                        if not response.is_success:
                            content = await self._content(response)
                except (TimeoutError, httpx.TransportError) as error:
                    await self._wait(attempt, self._unreachable(error))
                    continue
                if response.is_success:
                    asking.succeeded()
                    yield response, attempt
                    return
            attempt = await self._after_error(attempt, response, content, asking)

    def _request(self, body: JsonObject, asking: ExtensionAttempt) -> AbstractAsyncContextManager[httpx.Response]:
        if self._client is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            secure = self.base_url.startswith("https:")
            self._client = httpx.AsyncClient(timeout=self._timeout, headers=headers, verify=secure, trust_env=secure)
        extra = extension_values(asking.fields, body)
        return self._client.stream("POST", f"{self.base_url}/chat/completions", json={**body, **extra})

    async def _content(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            self._check_size(len(content))
        return bytes(content)

    def _check_size(self, size: int) -> None:
        if size > _MAX_RESPONSE_BYTES:
            raise ModelError(f"{self.base_url} answered more than {_MAX_RESPONSE_BYTES} bytes")

    async def _after_error(
        self, attempt: int, response: httpx.Response, content: bytes, asking: ExtensionAttempt
    ) -> int:
        """Wait before the next attempt; returns the number of attempts that count. Raises when a retry is useless."""
        problem = f"{self.base_url} answered {response.status_code}: {self._message_of(content)}"
        if asking.is_refused(response.status_code, content):
            return attempt - 1
        if response.status_code < 500 and response.status_code not in _RETRIED:
            raise ModelError(problem)
        await self._wait(attempt, problem, _retry_after(response.headers))
        return attempt

    async def _wait(self, attempt: int, problem: str, pause: float | None = None) -> None:
        if attempt > self._retries:
            raise InfrastructureError(f"{problem} (after {attempt} attempts)")
        await asyncio.sleep(pause if pause is not None else self._backoff.pause(attempt))

    def _unreachable(self, error: TimeoutError | httpx.TransportError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"no model server answers at {self.base_url}: start it with `openhands-rl serve` or set base_url"
        if isinstance(error, TimeoutError | httpx.TimeoutException):
            return f"the model server at {self.base_url} did not answer within {self._timeout:g} s"
        return f"the connection to the model server at {self.base_url} broke ({type(error).__name__})"

    def _message_of(self, content: bytes) -> str:
        text = _error_message(content)
        return text.replace(self._key, "***") if self._key else text


def _with_seed_offset(sampling: SamplingParams, offset: int) -> SamplingParams:
    if sampling.seed is None or offset == 0:
        return sampling
    return sampling.model_copy(update={"seed": sampling.seed + offset})


def _api_key(api_key: str | None, variable: str | None) -> str | None:
    if api_key is None and variable:
        api_key = os.environ.get(variable)
        if api_key is None:
            raise ConfigError(f"the environment variable {variable} is not set: export it with the server's API key")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds characters that no HTTP header may have: see that no line end is in it")
    return api_key


def _retry_after(headers: httpx.Headers) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(seconds, 0.0), _LONGEST_PAUSE) if seconds == seconds else None


def _error_message(content: bytes) -> str:
    """The server's error message, on one line of at most 300 characters."""
    text = content[:4096].decode("utf-8", errors="replace")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else text
    return " ".join(text.split())[:300] or "(empty)"
