"""The label tokens' probabilities from a server: OpenAI's ``POST /completions`` with vLLM's extensions.

One token is sampled and the 20 likeliest are read: with a trained verifier both labels are among them. Otherwise each
label is appended to the prompt and read from ``prompt_logprobs``, which is exact but may bypass the prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import CaughtFailure, GraderError, InfrastructureError, ModelError, boundary
from openhands_rl_plugin.core.servers import named_key
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject
from openhands_rl_plugin.training.verifier.card import VerifierOutput

AT_ONCE = 16
"""Concurrent requests: enough for the server to batch them and to use its prefix cache."""

_TOP = 20  # the largest number of logprobs that vLLM returns by default (max_logprobs)
_RETRIES = 4
_BACKOFF = Backoff(first=0.375, longest=3.0)
_RETRIED = frozenset({408, 409, 425, 429})  # statuses of temporary conditions, besides 5xx
_LARGEST = 64 * 1024 * 1024  # prompt_logprobs of a long prompt are megabytes; more is not an answer


class ServedVerifier:
    """A verifier behind ``base_url`` (up to and including /v1), known there as ``model``; prompts are token ids.

    Raises ``ConfigError`` when ``api_key_env`` names a variable that is not set.
    """

    def __init__(
        self, base_url: str, model: str, *, yes: int, no: int, api_key_env: str = "", timeout: float = 120.0
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/completions"
        self._model = model
        self._yes, self._no = yes, no
        self._headers = {"authorization": f"Bearer {key}"} if (key := named_key(api_key_env, "api_key_env")) else {}
        self._timeout = timeout

    async def judge(self, prompts: Sequence[tuple[int, ...]]) -> list[VerifierOutput | Failure]:
        """One output per prompt, in order; a failed request affects its own prompt only."""
        slots = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout) as client:

            async def one(prompt: tuple[int, ...]) -> VerifierOutput | Failure:
                try:
                    async with slots:
                        with boundary(FailureKind.INFRASTRUCTURE, "verifier server"):
                            return await self._verdict(client, prompt)
                except CaughtFailure as caught:
                    return caught.failure

            # The first request fills the server's prefix cache with the common prefix.
            first = [await one(prompt) for prompt in prompts[:1]]
            return [*first, *await asyncio.gather(*map(one, prompts[1:]))]

    async def _verdict(self, client: httpx.AsyncClient, prompt: tuple[int, ...]) -> VerifierOutput:
        asked: JsonObject = {"temperature": 0.0, "logprobs": _TOP, "return_tokens_as_token_ids": True}
        (choice,) = await self._choices(client, {"prompt": list(prompt), **asked}, 1)
        top = _top_of(choice)
        yes, no = top.get(self._yes), top.get(self._no)
        if yes is None or no is None:
            forced: JsonObject = {"prompt": [[*prompt, token] for token in (self._yes, self._no)]}
            choices = await self._choices(client, {**forced, "prompt_logprobs": 0}, 2)
            yes, no = (_last_of(one, token) for one, token in zip(choices, (self._yes, self._no), strict=True))
        return VerifierOutput(margin=yes - no, mass=min(1.0, math.exp(yes) + math.exp(no)))

    async def _choices(self, client: httpx.AsyncClient, body: JsonObject, count: int) -> list[_Choice]:
        content = await self._post(client, {"model": self._model, "max_tokens": 1, **body})
        try:
            choices = sorted(_Answer.model_validate(json.loads(content)).choices, key=lambda choice: choice.index)
        except (ValidationError, ValueError, RecursionError) as error:
            raise ModelError(f"{self._url} did not answer with completions; check base_url") from error
        if len(choices) != count:
            raise ModelError(f"{self._url} answered {len(choices)} choices for {count} prompts")
        return choices

    async def _post(self, client: httpx.AsyncClient, body: JsonObject) -> bytes:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self._timeout), client.stream("POST", self._url, json=body) as response:
                    content = await _bounded(response)
            except (TimeoutError, httpx.TransportError) as error:
                problem = f"no answer from {self._url} ({type(error).__name__}); is the verifier served there?"
            else:
                if response.is_success:
                    return content
                problem = f"{self._url} answered {response.status_code}: {_shown(content)}"
                if response.status_code < 500 and response.status_code not in _RETRIED:
                    raise ModelError(problem)
            if attempt > _RETRIES:
                raise InfrastructureError(f"{problem} (after {attempt} attempts)")
            await _BACKOFF.wait(attempt)


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Logprobs(_Wire):
    top_logprobs: tuple[dict[str, float] | None, ...] = ()


class _PromptLogprob(_Wire):
    logprob: float


class _Choice(_Wire):
    index: int = 0
    logprobs: _Logprobs | None = None
    prompt_logprobs: tuple[dict[str, _PromptLogprob] | None, ...] | None = None


class _Answer(_Wire):
    choices: tuple[_Choice, ...] = Field(min_length=1)


def _top_of(choice: _Choice) -> dict[int, float]:
    """The likeliest first tokens by id; tokens that are not given as ids are left out."""
    given = choice.logprobs.top_logprobs if choice.logprobs is not None else ()
    top = given[0] if given and given[0] is not None else {}
    named = ((name.removeprefix("token_id:"), logprob) for name, logprob in top.items() if name.startswith("token_id:"))
    return {int(token): logprob for token, logprob in named if token.isdecimal() and math.isfinite(logprob)}


def _last_of(choice: _Choice, token: int) -> float:
    last = choice.prompt_logprobs[-1] if choice.prompt_logprobs else None
    entry = (last or {}).get(str(token))
    if entry is None or not math.isfinite(entry.logprob):
        raise GraderError(
            "the server gives no logprobs of the labels: use vLLM or `openhands-rl serve`, or leave base_url out to "
            "score in this process"
        )
    return entry.logprob


async def _bounded(response: httpx.Response) -> bytes:
    content = bytearray()
    async for data in response.aiter_bytes():
        content += data
        if len(content) > _LARGEST:
            raise ModelError(f"the verifier's server answered more than {_LARGEST} bytes")
    return bytes(content)


def _shown(content: bytes) -> str:
    return " ".join(content[:400].decode("utf-8", errors="replace").split())[:200] or "(empty)"
