"""OpenAI-compatible endpoint of the agent: every request runs one episode to its final answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.apps.endpoint.agent import AgentRuntime
from openhands_rl_plugin.apps.endpoint.config import AgentConfig
from openhands_rl_plugin.apps.endpoint.events import (
    AgentEvent,
    AgentResult,
    Answer,
    Stopped,
    TextDelta,
    ToolCallStarted,
    ToolResult,
)
from openhands_rl_plugin.apps.endpoint.protocol import (
    AgentChunk,
    AgentChunkChoice,
    AgentCompletionRequest,
    AgentDelta,
    completion_response,
    finish_reason,
    stop_reason,
    tool_event_delta,
    usage_of,
)
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.servers.bodies import BodyReader
from openhands_rl_plugin.core.types import Failure, FailureKind
from openhands_rl_plugin.models.generator.errors import NotFound, Overloaded, ServingError, UpstreamFailure
from openhands_rl_plugin.models.server.http import (
    ERROR_HANDLERS,
    SSE_DONE,
    error_body,
    json_response,
    sse_event,
    unless_disconnected,
)
from openhands_rl_plugin.models.server.responses import ModelCard, ModelList, UsageInfo, now

OpenRuntime = Callable[[], AbstractAsyncContextManager[AgentRuntime]]


def build_app(config: AgentConfig, open_runtime: OpenRuntime) -> Starlette:
    """The ASGI application; its lifespan opens the runtime."""
    endpoints = AgentEndpoints(config, open_runtime)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/health", endpoints.health),
        ],
        exception_handlers=ERROR_HANDLERS,
        lifespan=endpoints.lifespan,
    )


class ConcurrencyLimit:
    """Runs at most ``running`` requests at a time and queues at most ``waiting`` more."""

    def __init__(self, running: int, waiting: int) -> None:
        self._slots = asyncio.Semaphore(running)
        self._most = running + waiting
        self._inside = 0

    def check(self) -> None:
        """Raise ``Overloaded`` when the queue is full."""
        if self._inside >= self._most:
            raise Overloaded(f"{self._inside} requests are running or waiting; retry later.")

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises ``Overloaded``."""
        self.check()
        self._inside += 1
        try:
            async with self._slots:
                yield
        finally:
            self._inside -= 1


class AgentEndpoints:
    """One method per path."""

    def __init__(self, config: AgentConfig, open_runtime: OpenRuntime) -> None:
        self._config = config
        self._open_runtime = open_runtime
        self._bodies = BodyReader()
        self._runtime: AgentRuntime | None = None
        self._limit = ConcurrencyLimit(config.max_running, config.max_waiting)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Open the runtime while the application runs."""
        async with self._open_runtime() as self._runtime:
            yield

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions.

        A stream also contains the text before each tool call, as separate paragraphs.
        """
        body = await self._bodies.read(await request.body(), AgentCompletionRequest.model_validate_json)
        served = self._config.model
        if body.model and body.model != served:
            raise NotFound(f"The model '{body.model:.200}' does not exist; this is '{served}'.", param="model")
        runtime = self._runtime
        assert runtime is not None, "the application runs within its lifespan"
        self._limit.check()
        name = _new_name()
        if body.stream:
            events = _Stream(body, served, name).events(runtime, self._limit)
            return StreamingResponse(events, media_type="text/event-stream")
        result = await unless_disconnected(request, self._answer(runtime, body, name))
        if result.failure is not None:
            raise _error_of(result.failure)
        return json_response(completion_response(_identifier(name), served, result))

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the agent as the only model."""
        return json_response(ModelList(data=[ModelCard(id=self._config.model, root=self._config.model)]))

    async def health(self, _: Request) -> Response:
        """GET /health."""
        return Response()

    async def _answer(self, runtime: AgentRuntime, body: AgentCompletionRequest, name: str) -> AgentResult:
        async with self._limit.passed():
            return await runtime.run(body.conversation(), sampling=body.sampling(), name=name)


class _Stream:
    """One streamed response."""

    def __init__(self, body: AgentCompletionRequest, model: str, name: str) -> None:
        self._body = body
        self._model = model
        self._name = name
        self._created = now()
        self._turn = 0

    async def events(self, runtime: AgentRuntime, limit: ConcurrencyLimit) -> AsyncIterator[str]:
        """All events up to and including ``[DONE]``. The episode is cancelled when the client disconnects."""
        try:
            async with limit.passed():
                yield self._chunk(AgentDelta(role="assistant", content=""))
                stream = runtime.stream(self._body.conversation(), sampling=self._body.sampling(), name=self._name)
                async with aclosing(stream):  # pyright: ignore[reportArgumentType]
                    async for event in stream:
                        for text in self._sse_events(event):
                            yield text
        except ServingError as error:
            yield sse_event(error_body(error.status, error.message, error.kind))
        except StorageError as error:
            yield sse_event(error_body(500, str(error), "InternalServerError"))
        yield SSE_DONE

    def _sse_events(self, event: AgentEvent) -> list[str]:
        match event:
            case TextDelta():
                return [self._chunk(AgentDelta(content=self._paragraph(event.turn) + event.text))]
            case ToolCallStarted() | ToolResult():
                return [self._chunk(AgentDelta(tool_event=tool_event_delta(event)))]
            case Answer():
                return self._end(event.result, "" if event.streamed else self._paragraph(0) + event.text)
            case Stopped():
                if event.result.failure is not None:
                    raise _error_of(event.result.failure)
                return self._end(event.result, "")

    def _paragraph(self, turn: int) -> str:
        """The separator before the text of ``turn``: a paragraph break after an earlier turn."""
        before, self._turn = self._turn, turn
        return "\n\n" if before and before != turn else ""

    def _end(self, result: AgentResult, text: str) -> list[str]:
        last = AgentChunkChoice(
            index=0,
            delta=AgentDelta(content=text or None),
            finish_reason=finish_reason(result),
            stop_reason=stop_reason(result),
        )
        ending = [self._event([last])]
        if self._body.stream_options and self._body.stream_options.include_usage:
            ending.append(self._event([], usage_of(result)))
        return ending

    def _chunk(self, delta: AgentDelta) -> str:
        return self._event([AgentChunkChoice(index=0, delta=delta)])

    def _event(self, choices: list[AgentChunkChoice], usage: UsageInfo | None = None) -> str:
        identifier = _identifier(self._name)
        return sse_event(
            AgentChunk(id=identifier, created=self._created, model=self._model, choices=choices, usage=usage)
        )


def _error_of(failure: Failure) -> ServingError:
    if failure.kind is FailureKind.INFRASTRUCTURE:
        return Overloaded(failure.message)
    return UpstreamFailure(failure.message)


def _new_name() -> str:
    return uuid.uuid4().hex


def _identifier(name: str) -> str:
    """The ``id`` of the response; ``name`` is the task id of the recorded episode."""
    return f"chatcmpl-{name}"
