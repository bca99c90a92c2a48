"""The HTTP endpoints over a generator: prompts rendered, requests submitted, answers whole or streamed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import cast

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import error_body, listening, read_body, serving
from openhands_rl_plugin.core.templates import RenderError, TemplateTokenizer, chat_text
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import (
    DEFAULT_ADAPTERS,
    InvalidUserInput,
    ServerConfig,
    ServingError,
    StartError,
)
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.model import LoadedAdapter
from openhands_rl_plugin.models.generator.sequence import DecodingParams, Generation, ScoredToken
from openhands_rl_plugin.models.server.wire import (
    ERROR_HANDLERS,
    SSE_DONE,
    ChatCompletionRequest,
    CompletionRequest,
    Conversation,
    Formatter,
    LoadRequest,
    SamplingFields,
    TokenizeRequest,
    UnloadRequest,
    chat_body,
    chunk_body,
    chunk_choice,
    json_response,
    models_body,
    new_id,
    now,
    parse_tool_calls,
    present,
    sse_event,
    tool_call_bodies,
    unless_disconnected,
    usage,
)

log = redacting_logger(__name__)
# Seconds that an adapter keeps taking requests after it was asked to be unloaded.
_UNLOAD_GRACE = 0.25
_BEGINS_CALL = re.compile(r"[<`{]")
_SAMPLED = {field.name for field in fields(DecodingParams)} - {"max_tokens", "top_logprobs"}
Ids = tuple[int, ...]
Events = asyncio.Queue[tuple[int, ScoredToken | Future[Generation], str]]
"""The generator's events for a stream: (index of the choice, new token or end, text to send)."""


class PromptRenderer:
    """Renders conversations and texts to token ids with the model's tokenizer. Safe in any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        """``chat_template``: a file in the place of the model's own template. Raises ``StartError``."""
        self._tokenizer = tokenizer
        try:
            self._template = Path(chat_template).read_text(encoding="utf-8") if chat_template else None
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"cannot read the chat template {chat_template}: {error}") from error

    def chat(self, request: Conversation) -> Ids:
        """The token ids of a conversation, with the generation prompt. Raises ``ServingError``."""
        tools = [tool.model_dump() for tool in request.tools or ()]
        wires = [message.wire for message in request.messages]
        more = {**(request.chat_template_kwargs or {}), "continue_final_message": request.continue_final_message}
        cue, tokenizer = request.add_generation_prompt, cast(TemplateTokenizer, self._tokenizer)
        try:
            text = chat_text(tokenizer, wires, tools, cue=cue, template=self._template, options=more)
        except RenderError as error:
            raise ServingError(f"The chat template rejected the messages: {error}", param="messages") from error
        return self.text(text, special=False)

    def text(self, text: str, *, special: bool) -> Ids:
        """The token ids of a text, with or without special tokens."""
        # Unlike ``encode``, a batch leaves the interpreter to other threads while it works.
        return tuple(self._tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)


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
        self._prompts = PromptRenderer(generator.tokenizer, config.chat_template)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._read(request, ChatCompletionRequest)
        events: Events | None = asyncio.Queue() if body.stream else None
        top = (body.top_logprobs or 0) if body.logprobs else None
        model, prompt, futures = await self._submit(body, lambda: self._prompts.chat(body), body.limit, top, events)
        formatter = Formatter(self._generator.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        if events is not None:
            stream = _chat_events(events, body, model, prompt, futures, formatter)
            return StreamingResponse(stream, media_type="text/event-stream")
        answers = await _answers(request, futures)
        choices = [formatter.chat_choice(index, answer, body) for index, answer in enumerate(answers)]
        ids = list(prompt) if body.return_token_ids else None
        more = {"prompt_logprobs": formatter.prompt_logprobs(answers[0]), "prompt_token_ids": ids}
        return json_response(chat_body(new_id("chatcmpl"), model, choices, usage(answers), **more))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._read(request, CompletionRequest)

        def prompt() -> Ids:
            given = body.prompt
            return self._prompts.text(given, special=body.add_special_tokens) if isinstance(given, str) else given

        model, _, futures = await self._submit(body, prompt, body.max_tokens or 16, body.logprobs)
        formatter = Formatter(self._generator.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        answers = await _answers(request, futures)
        choices = [formatter.text_choice(index, answer, body) for index, answer in enumerate(answers)]
        head = {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": model}
        return json_response({**head, "choices": choices, "usage": usage(answers)})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await self._read(request, TokenizeRequest)
        self._adapter(body.model)
        if body.messages:
            ids = await run_in_threadpool(self._prompts.chat, body)
        else:
            ids = await run_in_threadpool(self._prompts.text, body.prompt, special=body.add_special_tokens)
        longest = self._generator.max_model_len
        return json_response({"count": len(ids), "max_model_len": longest, "tokens": list(ids)})

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the base model, then the adapters."""
        base = self._config.base_name
        served = self._generator
        root = str(served.model.directory.absolute())
        cards = [{"id": base, "root": root, "max_model_len": served.max_model_len}]
        cards += [{"id": each.name, "root": each.path, "parent": base} for each in served.adapters]
        return json_response(models_body(cards))

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        body = await self._read(request, LoadRequest)
        if body.lora_name == self._config.base_name:
            raise InvalidUserInput(f"'{body.lora_name}' is the base model's name.", param="lora_name")
        path = self._below_adapters(body.lora_path)
        await run_in_threadpool(self._generator.load_adapter, body.lora_name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter; answers when the adapter's last request in flight has ended.

        Requests that were sent before this one, but are still on their way through other connections, are served.
        """
        body = await self._read(request, UnloadRequest)
        await asyncio.sleep(_UNLOAD_GRACE)
        await run_in_threadpool(self._generator.unload_adapter, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: Request) -> Response:
        """GET /health."""
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

    def _adapter(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a requested model; ``None`` for the base model. Raises ``NotFound``."""
        return None if not name or name == self._config.base_name else self._generator.adapter(name)

    async def _submit(
        self,
        body: SamplingFields,
        render: Callable[[], Ids],
        limit: int | None,
        top: int | None,
        events: Events | None = None,
    ) -> tuple[str, Ids, list[Future[Generation]]]:
        """Submit ``n`` choices, or none; gives the model's name, the prompt, and the choices."""
        loop = asyncio.get_running_loop()
        adapter = self._adapter(body.model)
        futures: list[Future[Generation]] = []

        def put(index: int, event: ScoredToken | Future[Generation], text: str = "") -> None:
            # A closed loop means that the server is shutting down and the stream has no reader.
            if events is not None and not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, (index, event, text))

        prompt = await run_in_threadpool(render)
        given = body.model_dump(include=_SAMPLED, exclude_none=True)
        params = DecodingParams(**given, max_tokens=limit, top_logprobs=top)
        try:
            for own in params.seeds(body.n or 1):
                show = partial(put, len(futures))
                listener = None if events is None else show
                futures.append(self._generator.submit(prompt, own, adapter=adapter, on_delta=listener))
                futures[-1].add_done_callback(show)
        except ServingError:
            _cancel(futures)
            raise
        return adapter.name if adapter else self._config.base_name, prompt, futures


async def _answers(request: Request, futures: Sequence[Future[Generation]]) -> list[Generation]:
    """Wait for all choices; cancel them when one fails or the client disconnects."""
    try:
        return await unless_disconnected(request, asyncio.gather(*map(asyncio.wrap_future, futures)))
    finally:
        _cancel(futures)


def _cancel(futures: Sequence[Future[Generation]]) -> None:
    for future in futures:
        future.cancel()


async def _chat_events(
    events: Events,
    request: ChatCompletionRequest,
    model: str,
    prompt: Ids,
    futures: Sequence[Future[Generation]],
    formatter: Formatter,
) -> AsyncIterator[str]:
    """The events of a chat completion, up to and including ``[DONE]``; an error event where a choice fails.

    Where tools are offered, text behind a sign that a call may begin with waits for the end of the choice. Cancels the
    choices when the client disconnects.
    """
    head = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": now(), "model": model}
    tools, count = request.callable, len(futures)
    texts, sent = [""] * count, [0] * count
    left = set(range(count))
    try:
        for index in range(count):
            first = chunk_choice(index, delta={"role": "assistant", "content": ""})
            ids = list(prompt) if index == 0 and request.return_token_ids else None
            yield sse_event(chunk_body(head, [first], prompt_token_ids=ids))
        while left:
            index, event, text = await events.get()
            if isinstance(event, Future):
                left.remove(index)
                answer = event.result()
                parsed = parse_tool_calls(answer.text, tools)
                calls = [{"index": at, **call} for at, call in enumerate(tool_call_bodies(parsed.calls))]
                rest = parsed.text[sent[index] :]
                choice = chunk_choice(
                    index,
                    "tool_calls" if calls else answer.finish_reason,
                    delta=present({"content": rest or None, "tool_calls": calls or None}),
                    stop_reason=answer.stop_reason,
                )
            else:
                texts[index] += text
                held = _BEGINS_CALL.search(texts[index]) if tools else None
                text = texts[index][sent[index] : held.start() if held else None]
                sent[index] += len(text)
                choice = chunk_choice(
                    index,
                    delta=present({"content": text or None}),
                    logprobs=formatter.chat_logprobs([event]) if request.logprobs else None,
                    token_ids=[event.token] if request.return_token_ids else None,
                )
            yield sse_event(chunk_body(head, [choice]))
        if request.with_usage:
            yield sse_event(chunk_body(head, [], usage=usage([each.result() for each in futures])))
        yield SSE_DONE
    except ServingError as error:
        yield sse_event(error_body(error.status, error.message, error.kind))
    finally:
        _cancel(futures)


def load_versions_in_use(generator: Generator, store: AdapterStore) -> None:
    """Serve every version in use below ``store``; one that does not fit the model is named and left out.

    Raises ``StorageError`` for a damaged store.
    """
    for adapter in store.in_use():
        try:
            generator.load_adapter(adapter.name, Path(adapter.path))
        except ServingError as error:
            log.warning("%s is not served: %s", adapter.name, error)


@contextmanager
def running_server(config: ServerConfig, generator: Generator | None = None) -> Iterator[str]:
    """A server in a background thread; yields its base URL (``http://127.0.0.1:PORT``).

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
        url = stack.enter_context(
            serving(
                build_app(config, served),
                listener,
                access=access,
                max_body_bytes=config.max_body_bytes,
                lifespan="off",
            )
        )
        yield url
