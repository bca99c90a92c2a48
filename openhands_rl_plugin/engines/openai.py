"""Completions from any OpenAI-compatible endpoint (vLLM, SGLang, `openhands-rl serve`, hosted models)."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence

import httpx

from openhands_rl_plugin.errors import ConfigError, InfrastructureError, ModelError
from openhands_rl_plugin.types import Completion, JsonObject, Message, SamplingParams

from .defaults import merge_sampling
from .openai_wire import completions_from, request_body

_RETRIED = frozenset({408, 409, 425, 429})
_LONGEST_PAUSE = 20.0
_MAX_RESPONSE_BYTES = 256 * 1024 * 1024
# Asked for beyond the common protocol; an endpoint that names one of them in a refusal is not asked for it again.
_EXTENSIONS: Mapping[str, JsonObject] = {"logprobs": {"logprobs": True}, "return_token_ids": {"return_token_ids": True}}


class OpenAIEngine:
    """``protocols.LLMEngine`` over ``POST {base_url}/chat/completions``.

    Args:
        model: the served name to ask for, for example ``policy-v000007``.
        base_url: up to and including ``/v1``.
        api_key: sent as a bearer token; never stored elsewhere, shown or logged.
        api_key_env: name of an environment variable that holds the key.
        base_model: name of the weights under the adapter; ``model`` when it is served as it is.
        timeout: seconds for one request.
        retries: how often a request is repeated when the server is away, slow or overloaded.
        backoff: seconds before the first repetition; doubled each time, with jitter.
        sampling: used for whatever a call leaves open.

    Belongs to the event loop of its first request; ``aclose`` ends it.
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
    ) -> None:
        self.model = model
        self.base_model = base_model or model
        self.base_url = base_url.rstrip("/")
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._sampling = sampling or SamplingParams()
        self._extensions = dict(_EXTENSIONS)
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
            # Some servers answer one choice whatever n is; what is missing is asked for with another seed.
            asked = _with_seed_offset(wanted, len(completions))
            body = request_body(self.model, messages, tools=tools, n=n - len(completions), sampling=asked)
            answer, attempts = await self._post(body)
            completions += completions_from(answer, self.base_model, self.model, asked, attempts=attempts)
        return completions[:n]

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _post(self, body: JsonObject) -> tuple[bytes, int]:
        """The answer to one request and how many attempts it took."""
        attempt = 0
        while True:
            asked_for = {key: value for extension in self._extensions.values() for key, value in extension.items()}
            attempt += 1
            pause, problem = None, ""
            try:
                status, headers, content = await self._post_once({**body, **asked_for})
            except (TimeoutError, httpx.TransportError) as error:
                problem = self._unreachable(error)
            else:
                if status < 300:
                    return content, attempt
                problem = f"{self.base_url} answered {status}: {self._message_of(content)}"
                if status in (400, 422) and self._drop_refused_extension(problem):
                    attempt -= 1
                    continue
                if status < 500 and status not in _RETRIED:
                    raise ModelError(problem)
                pause = _retry_after(headers)
            if attempt > self._retries:
                raise InfrastructureError(f"{problem} (after {attempt} attempts)")
            await asyncio.sleep(pause if pause is not None else self._pause(attempt))

    async def _post_once(self, body: JsonObject) -> tuple[int, httpx.Headers, bytes]:
        if self._client is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            secure = self.base_url.startswith("https:")
            self._client = httpx.AsyncClient(timeout=self._timeout, headers=headers, verify=secure, trust_env=secure)
        url = f"{self.base_url}/chat/completions"
        async with asyncio.timeout(self._timeout), self._client.stream("POST", url, json=body) as response:
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > _MAX_RESPONSE_BYTES:
                    raise ModelError(f"{self.base_url} answered more than {_MAX_RESPONSE_BYTES} bytes")
        return response.status_code, response.headers, bytes(content)

    def _unreachable(self, error: TimeoutError | httpx.TransportError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"no model server answers at {self.base_url}: start it with `openhands-rl serve` or set base_url"
        if isinstance(error, TimeoutError | httpx.TimeoutException):
            return f"the model server at {self.base_url} did not answer within {self._timeout:g} s"
        return f"the connection to the model server at {self.base_url} broke ({type(error).__name__})"

    def _drop_refused_extension(self, problem: str) -> bool:
        refused = [name for name in self._extensions if name in problem]
        for name in refused:
            del self._extensions[name]
        return bool(refused)

    def _message_of(self, content: bytes) -> str:
        text = _error_message(content)
        return text.replace(self._key, "***") if self._key else text

    def _pause(self, attempt: int) -> float:
        longest = min(self._backoff * 2 ** (attempt - 1), _LONGEST_PAUSE)
        return random.uniform(longest / 2, longest)


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
    """The server's own words, on one line of at most 300 characters."""
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
