"""Completions from any OpenAI-compatible endpoint (vLLM, SGLang, ``openhands-rl serve``, hosted models)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing

import httpx

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import error_in
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.servers import named_key, sendable_key
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
from openhands_rl_plugin.models.engines.openai_wire import (
    AnsweredError,
    StreamedAnswer,
    completions_from,
    parsed,
    request_body,
)
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
        timeout: seconds for one request, from the connection to the last byte.
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
        self._key = sendable_key(api_key, "api_key") if api_key else named_key(api_key_env or "", "api_key_env")
        self._client: httpx.AsyncClient | None = None
        self._single = False

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
            # Some servers ignore n and return one choice, or refuse it; the others are requested with other seeds.
            asked, many = _with_seed_offset(wanted, len(completions)), 1 if self._single else n - len(completions)
            body = request_body(self.model, messages, tools=tools, n=many, sampling=asked)
            asking = self._extensions.attempt(self.model, (*self._tokens, SAMPLING))
            try:
                async for answer in self._asked(body, asked, asking):
                    completions += answer if isinstance(answer, list) else ()
            except ModelError:
                if many == 1:
                    raise
                self._single = True
        return completions[:n]

    async def stream(
        self, messages: Sequence[Message], *, tools: Sequence[JsonObject] = (), sampling: SamplingParams | None = None
    ) -> AsyncIterator[str | Completion]:
        """Yields the text as it is sampled, then the completion. Raises as ``complete`` does.

        A request is retried only before the first text.
        """
        wanted = merge_sampling(sampling, self._sampling)
        body = request_body(self.model, messages, tools=tools, n=1, sampling=wanted)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        asking = self._extensions.attempt(self.model, (*self._tokens, SAMPLING))
        async with aclosing(self._asked(streamed, wanted, asking)) as parts:
            async for part in parts:
                yield part if isinstance(part, str) else part[0]

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _asked(
        self, body: JsonObject, sampling: SamplingParams, asking: ExtensionAttempt
    ) -> AsyncGenerator[str | list[Completion]]:
        """The texts of a streamed answer as they come, then the completions. What training needs and is missing is
        named in their metadata."""
        attempt, shown, clock = 0, False, asyncio.get_running_loop()
        while True:
            attempt += 1
            deadline = clock.time() + self._timeout
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout_at(deadline):
                        response = await stack.enter_async_context(self._request(body, asking))
                    streams = response.is_success and "event-stream" in response.headers.get("content-type", "")
                    answer, content, size, reads = StreamedAnswer(), bytearray(), 0, response.aiter_bytes()
                    while True:
                        async with asyncio.timeout_at(deadline):
                            data = await anext(reads, None)
                        if data is None:
                            break
                        if (size := size + len(data)) > _MAX_RESPONSE_BYTES:
                            raise ModelError(f"{self.base_url} answered more than {_MAX_RESPONSE_BYTES} bytes")
                        if not streams:
                            content += data
                            continue
                        for text in answer.feed(data):
                            shown, before = True, clock.time()
                            yield text
                            deadline += clock.time() - before  # the caller's time is not the server's
                if not response.is_success:
                    said, pause = _error_message(bytes(content)), _retry_after(response.headers)
                    raise AnsweredError(response.status_code, said, bytes(content), pause)
                sent = sampling_as_sent(sampling, asking)
                whole = answer.whole() if streams else bytes(content)
                found = completions_from(whole, self.base_model, self.model, sent, attempts=attempt)
            except (TimeoutError, httpx.TransportError) as error:
                if shown:
                    raise InfrastructureError(self._unreachable(error)) from error
                await self._wait(attempt, self._unreachable(error))
            except AnsweredError as error:
                attempt = await self._after_error(attempt, error, asking, shown=shown)
            else:
                asking.succeeded()
                yield [
                    each.model_copy(update={"metadata": {**each.metadata, MISSING: missing}})
                    if self._tokens and (missing := missing_parts(asking.why_missing, each.tokens))
                    else each
                    for each in found
                ]
                return

    def _request(self, body: JsonObject, asking: ExtensionAttempt) -> AbstractAsyncContextManager[httpx.Response]:
        if self._client is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            secure = self.base_url.startswith("https:")
            self._client = httpx.AsyncClient(timeout=self._timeout, headers=headers, verify=secure, trust_env=secure)
        extra = extension_values(asking.fields, body)
        return self._client.stream("POST", f"{self.base_url}/chat/completions", json={**body, **extra})

    async def _after_error(self, attempt: int, error: AnsweredError, asking: ExtensionAttempt, *, shown: bool) -> int:
        """Wait before the next attempt; returns the number of attempts that count. Raises when a retry is useless."""
        message = error.message.replace(self._key, "***") if self._key else error.message
        problem = f"{self.base_url} answered {error.status}: {message}"
        if not shown and asking.is_refused(error.status, error.body):
            return attempt - 1
        if error.status < 500 and error.status not in _RETRIED:
            raise ModelError(problem)
        if shown:
            raise InfrastructureError(problem)
        await self._wait(attempt, problem, error.pause)
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


def _with_seed_offset(sampling: SamplingParams, offset: int) -> SamplingParams:
    if sampling.seed is None or offset == 0:
        return sampling
    return sampling.model_copy(update={"seed": sampling.seed + offset})


def _retry_after(headers: httpx.Headers) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(seconds, 0.0), _LONGEST_PAUSE) if seconds == seconds else None


def _error_message(content: bytes) -> str:
    """The server's error message, on one line of at most 300 characters."""
    found = error_in(parsed(content))
    text = found[1] if found is not None else content[:4096].decode("utf-8", errors="replace")
    return " ".join(text.split())[:300] or "(empty)"
