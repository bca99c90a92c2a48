"""verl's servers take and give token ids: a chat endpoint over them on loopback, with a key for each episode."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.core.servers.bodies import BodyReader
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.models.generator.errors import NotFound, Overloaded, ServingError
from openhands_rl_plugin.models.generator.sampling import SampledToken
from openhands_rl_plugin.models.generator.sequence import FinishReason, Generation
from openhands_rl_plugin.models.server.error_handlers import ERROR_HANDLERS
from openhands_rl_plugin.models.server.formatting import Formatter, usage
from openhands_rl_plugin.models.server.http import json_response
from openhands_rl_plugin.models.server.prompts import PromptRenderer
from openhands_rl_plugin.models.server.requests import ChatCompletionRequest
from openhands_rl_plugin.models.server.responses import ChatCompletionResponse, new_id

MODEL = "policy"

type Sample = Callable[[tuple[int, ...], int], Awaitable[Any]]
"""Prompt ids and the most tokens -> verl's ``TokenOutput`` (``token_ids``, ``log_probs``, ``stop_reason``)."""


@dataclass(frozen=True)
class _Episode:
    sample: Sample
    loop: asyncio.AbstractEventLoop
    renderer: PromptRenderer
    tokenizer: Any


class PolicyEndpoint:
    """One server for all episodes of this process. Every episode has a key of its own, which is all that it knows."""

    def __init__(self) -> None:
        self._episodes: dict[str, _Episode] = {}
        self._bodies = BodyReader()
        self._running = ExitStack()
        self._url = ""

    @contextmanager
    def open(self, sample: Sample, tokenizer: Any, max_model_len: int) -> Iterator[tuple[str, str]]:
        """Within it an episode is answered by ``sample``, in this event loop; yields the endpoint's base URL and key.

        ``max_model_len``: tokens of prompt and answer together.
        """
        if not self._url:
            listener = self._running.enter_context(listening("127.0.0.1", 0))
            self._url = self._running.enter_context(serving(self._app(), listener, lifespan="off"))
        key = secrets.token_urlsafe(24)
        renderer = PromptRenderer(tokenizer, max_model_len, None)
        self._episodes[key] = _Episode(sample, asyncio.get_running_loop(), renderer, tokenizer)
        try:
            yield f"{self._url}/v1", key
        finally:
            del self._episodes[key]

    def close(self) -> None:
        """Stop the server."""
        self._running.close()
        self._url = ""

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)

    def _episode(self, request: Request) -> _Episode:
        found = self._episodes.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if found is None:
            raise NotFound("no episode has this key")
        return found

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "verl"}]})

    async def _chat(self, request: Request) -> Response:
        episode = self._episode(request)
        body = await self._bodies.read(await request.body(), ChatCompletionRequest.model_validate_json)
        ids = await asyncio.to_thread(episode.renderer.chat, body)
        most = body.max_completion_tokens or body.max_tokens
        params = episode.renderer.params(body, prompt_len=len(ids), max_tokens=most, top_logprobs=None)
        # What this request says of sampling is verl's to say; its length is the episode's.
        asked = asyncio.run_coroutine_threadsafe(_awaited(episode.sample(ids, params.max_tokens)), episode.loop)
        answer = _generation(ids, await asyncio.wrap_future(asked), params.max_tokens, episode.tokenizer)
        choice = Formatter(episode.tokenizer).chat_choice(
            0, answer, logprobs=True, token_ids=True, tools=bool(body.tools) and body.tool_choice != "none"
        )
        return json_response(
            ChatCompletionResponse(
                id=new_id("chatcmpl"),
                model=MODEL,
                choices=[choice],
                usage=usage([answer], 1),
                prompt_logprobs=None,
                prompt_token_ids=list(ids),
            )
        )


async def _awaited[T](work: Awaitable[T]) -> T:
    return await work


def _generation(ids: tuple[int, ...], output: Any, most: int, tokenizer: Any) -> Generation:
    if output.stop_reason == "aborted" or not output.token_ids:
        raise Overloaded("verl's server gave up the request")
    if output.log_probs is None or len(output.log_probs) != len(output.token_ids):
        raise ServingError("verl's server gave no logprobs")
    sampled = tuple(
        SampledToken(token=token, logprob=logprob, top=())
        for token, logprob in zip(output.token_ids, output.log_probs, strict=True)
    )
    return Generation(
        prompt_ids=ids,
        sampled=sampled,
        text=tokenizer.decode(output.token_ids, skip_special_tokens=True),
        finish_reason=FinishReason.LENGTH if len(sampled) >= most else FinishReason.STOP,
        stop_reason=None,
        prompt=None,
        cached_tokens=0,
        adapter=None,
    )
