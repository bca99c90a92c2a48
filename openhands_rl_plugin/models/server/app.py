"""The HTTP endpoints over a generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from anyio import CapacityLimiter, to_thread
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.core.files import is_file
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import listening, read_body, serving
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import DEFAULT_ADAPTERS, ServerConfig
from openhands_rl_plugin.models.generator.errors import InvalidUserInput, NotFound, Overloaded, ServingError
from openhands_rl_plugin.models.generator.generator import ADAPTER_NAME, Generator
from openhands_rl_plugin.models.generator.model import LoadedAdapter
from openhands_rl_plugin.models.generator.sequence import DecodingParams, Generation, RequestHandle
from openhands_rl_plugin.models.server.http import ERROR_HANDLERS, json_response, unless_disconnected
from openhands_rl_plugin.models.server.prompts import PromptRenderer
from openhands_rl_plugin.models.server.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    LoadLoRAAdapterRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    UpdateWeightsRequest,
)
from openhands_rl_plugin.models.server.responses import Formatter, chat_body, models_body, new_id, now, usage
from openhands_rl_plugin.models.server.streaming import DeltaQueue, cancelling, chat_events, text_events

log = redacting_logger(__name__)
# Seconds that an adapter keeps taking requests after it was asked to be unloaded.
_UNLOAD_GRACE = 0.25
_LONG_BODY = 256 * 1024

PromptJob = tuple[tuple[int, ...], DecodingParams]


def build_app(config: ServerConfig, generator: Generator) -> Starlette:
    """The ASGI application. It does not close the generator. Raises StartError for an unreadable template."""
    endpoints = ModelEndpoints(config, generator)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/load_lora_adapter", endpoints.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", endpoints.unload_adapter, methods=["POST"]),
            Route("/update_weights_from_disk", endpoints.update_weights, methods=["POST"]),
            Route("/tokenize", endpoints.tokenize, methods=["POST"]),
            Route("/health", endpoints.health),
        ],
        exception_handlers=ERROR_HANDLERS,
    )


class ModelEndpoints:
    """One method per path."""

    def __init__(self, config: ServerConfig, generator: Generator) -> None:
        self._config = config
        self._generator = generator
        self._adapters = Path(config.adapters or DEFAULT_ADAPTERS).expanduser().absolute()
        self._long_prompts = CapacityLimiter(1)
        self._prompts = PromptRenderer(generator.tokenizer, generator.max_model_len, config.chat_template)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._read(request, ChatCompletionRequest)
        queue = DeltaQueue() if body.stream else None
        weights = self._generator.weights
        with self._model(body.model) as (adapter, model):
            ids = await self._prompt(request, self._prompts.chat, body)
            top = (body.top_logprobs or 0) if body.logprobs else None
            limit = body.max_completion_tokens or body.max_tokens
            params = self._prompts.params(body, prompt_len=len(ids), max_tokens=limit, top_logprobs=top)
            jobs = _samples(ids, params, body.n or 1)
            handles = self._submit(jobs, adapter, queue, weights)
        formatter = self._formatter(body.return_tokens_as_token_ids)
        if queue:
            return _stream(chat_events(queue, body, model, ids, formatter, len(jobs)), handles)
        answers = await self._answers(request, handles)
        logprobs, token_ids = bool(body.logprobs), bool(body.return_token_ids)
        choices = [
            formatter.chat_choice(index, answer, logprobs=logprobs, token_ids=token_ids, tools=body.callable)
            for index, answer in enumerate(answers)
        ]
        observed = formatter.prompt_logprobs(answers[0].prompt)
        counts = usage(answers, len(jobs))
        more = {"prompt_logprobs": observed, "prompt_token_ids": list(ids) if token_ids else None}
        return json_response(chat_body(new_id("chatcmpl"), model, choices, counts, **more))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._read(request, CompletionRequest)
        queue = DeltaQueue() if body.stream else None
        weights = self._generator.weights
        with self._model(body.model) as (adapter, model):
            prompts = await self._prompt(request, self._prompts.completion, body)
            if not prompts:
                raise ServingError("The prompt is empty.", param="prompt")
            jobs: list[PromptJob] = []
            for ids in prompts:
                params = self._prompts.params(
                    body, prompt_len=len(ids), max_tokens=body.max_tokens or 16, top_logprobs=body.logprobs
                )
                jobs.extend(_samples(ids, params, body.n or 1))
            handles = self._submit(jobs, adapter, queue, weights)
        formatter = self._formatter(body.return_tokens_as_token_ids)
        if queue:
            return _stream(text_events(queue, body, model, prompts, formatter, len(jobs)), handles)
        answers = await self._answers(request, handles)
        choices = [formatter.text_choice(index, answer, body) for index, answer in enumerate(answers)]
        head = {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": model}
        return json_response({**head, "choices": choices, "usage": usage(answers, body.n or 1)})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await self._read(request, TokenizeRequest)
        with self._model(body.model):
            if body.prompt is None:
                ids = await self._prompt(request, self._prompts.chat, body)
            else:
                special = body.add_special_tokens is not False
                ids = await self._prompt(request, partial(self._prompts.text, special=special), body.prompt)
        longest = self._generator.max_model_len
        return json_response({"count": len(ids), "max_model_len": longest, "tokens": list(ids)})

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the base model, then the adapters."""
        base = self._base_name
        served = self._generator
        root = str(served.model.directory.absolute())
        cards = [{"id": base, "root": root, "max_model_len": served.max_model_len}]
        cards += [{"id": each.name, "root": each.path, "parent": base} for each in served.adapters]
        return json_response(models_body(cards))

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        body = await self._read(request, LoadLoRAAdapterRequest)
        if not body.lora_name or not body.lora_path:
            raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
        if body.lora_name == self._base_name:
            raise InvalidUserInput(f"'{body.lora_name}' is the base model's name.", param="lora_name")
        path = self._below_adapters(body.lora_path)
        await run_in_threadpool(self._generator.load_adapter, body.lora_name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter; answers when the adapter's last request in flight has ended.

        Requests that were sent before this one, but are still on their way through other connections, are served.
        """
        body = await self._read(request, UnloadLoRAAdapterRequest)
        if not body.lora_name:
            raise InvalidUserInput("'lora_name' needs to be provided to unload a LoRA adapter.")
        if all(adapter.name != body.lora_name for adapter in self._generator.adapters):
            raise NotFound(f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name")
        await asyncio.sleep(_UNLOAD_GRACE)
        await asyncio.wrap_future(self._generator.unload_adapter(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def update_weights(self, request: Request) -> Response:
        """POST /update_weights_from_disk, as SGLang has it: all weights of another directory of the same model.

        They are served as ``weight_version``; the former name is unknown from then on. Answers when they are in use.
        """
        body = await self._read(request, UpdateWeightsRequest)
        name = body.weight_version
        if name != self._config.base_name and not ADAPTER_NAME.fullmatch(name):
            raise InvalidUserInput(f"The name {name[:80]!r} is not allowed: use letters, digits and ._@:+-")
        path = Path(body.model_path)
        if not self._generator.began_with(path):
            path = self._below_adapters(body.model_path)
        await run_in_threadpool(self._generator.replace_model, name, path)
        return json_response({"success": True, "message": f"{name} is served."})

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while the generator works, else 503."""
        if not self._generator.healthy:
            raise Overloaded("The generator has stopped.")
        return Response()

    def _below_adapters(self, name: str) -> Path:
        """The path of what a client names. Raises ``InvalidUserInput`` where links or ``..`` lead out of the folder."""
        path = self._adapters / name
        try:
            below = path.resolve().is_relative_to(self._adapters.resolve())
        except (OSError, ValueError, RuntimeError):  # no name of a file can be so; links lead in a circle
            below = False
        if not below:
            raise InvalidUserInput(
                f"{name[:200]!r} is not below {self._adapters}, the only folder that clients load from: start "
                "`openhands-rl serve` with --adapters DIR, [rl.serving] adapters_path"
            )
        return path

    async def _read[B: BaseModel](self, request: Request, kind: type[B]) -> B:
        return await read_body(await request.body(), kind.model_validate_json)

    async def _prompt[A, P](self, request: Request, make: Callable[[A], P], asked: A) -> P:
        """Token ids, made off the event loop: of long requests one after another, so that short ones pass them."""
        limiter = self._long_prompts if len(await request.body()) > _LONG_BODY else None
        return await to_thread.run_sync(make, asked, limiter=limiter)

    @contextmanager
    def _model(self, name: str | None) -> Iterator[tuple[LoadedAdapter | None, str]]:
        """(adapter or None for the base model, name to answer with); the adapter stays loaded meanwhile."""
        base = self._base_name
        if not name or name == base:
            yield None, base
        else:
            with self._generator.pin_adapter(name) as adapter:
                yield adapter, name

    @property
    def _base_name(self) -> str:
        return self._generator.weights or self._config.base_name

    def _formatter(self, as_ids: bool | None) -> Formatter:
        return Formatter(self._generator.tokenizer, as_ids=bool(as_ids))

    def _submit(
        self,
        jobs: Sequence[PromptJob],
        adapter: LoadedAdapter | None,
        queue: DeltaQueue | None,
        weights: str | None,
    ) -> list[RequestHandle]:
        """Submit all or none, for these ``weights`` of the generator."""
        handles: list[RequestHandle] = []
        try:
            for index, (ids, params) in enumerate(jobs):
                callback = queue.callback(index) if queue else None
                handles.append(self._generator.submit(ids, params, adapter=adapter, weights=weights, on_delta=callback))
        except ServingError:
            _cancel(handles)
            raise
        if queue:
            for index, handle in enumerate(handles):
                queue.watch(index, handle)
        return handles

    async def _answers(self, request: Request, handles: Sequence[RequestHandle]) -> list[Generation]:
        """Wait for all tickets; cancel them when the client disconnects."""
        try:
            return await unless_disconnected(
                request, asyncio.gather(*(asyncio.wrap_future(handle.future) for handle in handles))
            )
        finally:
            _cancel(handles)


def _samples(ids: tuple[int, ...], params: DecodingParams, count: int) -> list[PromptJob]:
    """``count`` jobs of one prompt; with a seed, choice i has seed + i (as in vLLM)."""
    return [(ids, params.with_seed(None if params.seed is None else params.seed + i)) for i in range(count)]


def _cancel(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


def _stream(events, handles: Sequence[RequestHandle]) -> StreamingResponse:
    return StreamingResponse(cancelling(events, lambda: _cancel(handles)), media_type="text/event-stream")


def load_versions_in_use(generator: Generator, store: AdapterStore) -> None:
    """Serve every version in use below ``store``; one that does not fit the model is named and left out.

    Raises ``StorageError`` for a damaged store.
    """
    for adapter in store.in_use():
        path = Path(adapter.path)
        try:
            if is_file(path / "config.json"):
                generator.replace_model(adapter.name, path)
            else:
                generator.load_adapter(adapter.name, path)
        except ServingError as error:
            log.warning("%s is not served: %s", adapter.name, error)


@contextmanager
def running_server(config: ServerConfig, generator: Generator | None = None) -> Iterator[str]:
    """As ``open_server``; yields the URL alone."""
    with open_server(config, generator) as (url, _):
        yield url


@contextmanager
def open_server(config: ServerConfig, generator: Generator | None = None) -> Iterator[tuple[str, Generator]]:
    """A server in a background thread; yields its base URL (``http://127.0.0.1:PORT``) and what it serves.

    With a ``generator`` that one is served and stays open; else one is loaded and closed. Raises ``ConfigError`` when
    a public host has no key, ``PortUnavailableError`` when the port is taken, ``StartError`` when the model cannot be
    loaded.
    """
    access = config.access()
    with ExitStack() as stack:
        listener = stack.enter_context(listening(config.host, config.port))
        served = generator or stack.enter_context(Generator(config))
        if config.adapters and config.preload:
            load_versions_in_use(served, AdapterStore(config.adapters))
        app = build_app(config, served)
        url = stack.enter_context(
            serving(
                app,
                listener,
                access=access,
                routes=[route.path for route in app.routes if isinstance(route, Route)],
                max_body_bytes=config.max_body_bytes,
                registry=served.metrics.registry,
                lifespan="off",
            )
        )
        yield url, served
