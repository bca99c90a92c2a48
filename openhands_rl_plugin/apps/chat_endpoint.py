"""A chat endpoint whose agent executes its tools: settings, requests, agent, streams, server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import HttpUrl, VariableName
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.protocols import LLMEngine, TrajectoryStorage
from openhands_rl_plugin.core.servers import error_body, listening, named_key, read_body, serving
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    Frozen,
    Limits,
    Message,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.environments.tools.environment import (
    ToolBase,
    ToolCallStarted,
    ToolEnvironment,
    ToolEvent,
    ToolListener,
    ToolOptions,
    ToolResult,
    TurnText,
)
from openhands_rl_plugin.models.engines.client import OpenAIEngine, SeededEngine, merge_sampling
from openhands_rl_plugin.models.generator.config import NotFound, Overloaded, ServerConfig, UpstreamFailure
from openhands_rl_plugin.models.server.wire import (
    ERROR_HANDLERS,
    SSE_DONE,
    Body,
    ChatCompletionRequest,
    Tool,
    assistant_body,
    chat_body,
    chunk_body,
    chunk_choice,
    json_response,
    models_body,
    now,
    sse_event,
    unless_disconnected,
    usage_body,
)
from openhands_rl_plugin.rollout.episode import AgentSession
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy


class AgentResult(Frozen):
    """Result of a request, and its last event. ``answer`` is ``None`` where there is none; ``stop`` and ``failure`` are
    the reason."""

    answer: str | None
    trajectory: Trajectory

    @property
    def stop(self) -> StopReason:
        """Why the episode ended."""
        return self.trajectory.stop

    @property
    def failure(self) -> Failure | None:
        """The failure of the episode, if any."""
        return self.trajectory.failure

    @property
    def end(self) -> dict[str, str | None]:
        """``finish_reason``: ``stop`` for an answer, ``length`` when a limit truncated it or ended the episode; and
        ``stop_reason``, why there is no answer."""
        cut = [node.finish_reason for node in self.trajectory.sampled()][-1:] == ["length"]
        reason = "length" if cut or self.answer is None else "stop"
        return {"finish_reason": reason, "stop_reason": self.stop.value if self.answer is None else None}

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages after those of the request, reasoning included: append them before the next user message."""
        path = self.trajectory.path()
        first = next((at for at, index in enumerate(path) if self.trajectory.nodes[index].sampled), len(path))
        return tuple(self.trajectory.nodes[index].message for index in path[first:])


AgentEvent = ToolEvent | AgentResult
"""The last event of a request, and only the last, is an ``AgentResult``."""


class AgentCompletionRequest(ChatCompletionRequest):
    """POST /v1/chat/completions. ``seed`` applies to the episode, ``max_tokens`` to each model response."""

    seed: int | None = Field(None, ge=0, lt=2**63)

    n: int | None = Field(None, ge=1, le=1)
    tools: Annotated[tuple[Tool, ...], Field(max_length=0, description="The tools are the agent's own.")] | None = None

    def sampling(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=self.limit, seed=self.seed)


DEFAULT_LIMITS = Limits(max_turns=32, max_response_length=2048, timeout=600.0)


class AgentRuntime:
    """Answers conversations with a policy and tools.

    Args:
        engine: the policy.
        tools: in addition to, or instead of, those of ``options.tools``; ``None``: only the latter. These objects are
            shared by all conversations, so a tool with state must be named in ``options`` instead.
        policy: what the engine samples from, for the records.
        options: of the ``ToolEnvironment``.
        limits: of one request. ``max_response_length`` is the maximum number of tokens of each model response.
        sampling: defaults for parameters that a request does not set.
        storage: records every conversation under ``run_id``; ``None``: no recording.

    ``aclose`` closes the engine and the storage; a caller who shares them closes them instead.
    """

    def __init__(
        self,
        engine: LLMEngine,
        tools: Sequence[ToolBase] | None = None,
        *,
        policy: PolicyRef,
        options: ToolOptions | None = None,
        limits: Limits = DEFAULT_LIMITS,
        sampling: SamplingParams | None = None,
        storage: TrajectoryStorage | None = None,
        run_id: str = "agent",
    ) -> None:
        self.policy = policy
        self._engine = engine
        self._tools = tools
        self._options = options or ToolOptions()
        self._limits = limits
        self._sampling = sampling or SamplingParams()
        self._storage = storage
        self._run_id = run_id
        # Invalid tools raise here, not at the first request.
        ToolEnvironment(self._options, tools=tools)

    async def run(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        name: str = "",
        listener: ToolListener | None = None,
    ) -> AgentResult:
        """Answer a conversation. ``sampling``: the parameters of this request; its ``seed`` is that of the episode.

        ``name`` identifies the recorded episode and must be unique; generated by default. ``listener`` takes the events
        of the episode. Failures are part of the result. Raises ``StorageError``.
        """
        name, wanted, bound = name or uuid.uuid4().hex, sampling or SamplingParams(), self._limits.max_response_length
        merged = merge_sampling(wanted, self._sampling)
        merged = merged.model_copy(update={"max_tokens": min(merged.max_tokens or bound, bound)})
        environment = ToolEnvironment(self._options, tools=self._tools, listener=listener)
        session = AgentSession(
            environment=environment,
            strategy=StandardReActStrategy(),
            strategy_spec=StrategySpec(name="StandardReAct"),
            engine=SeededEngine(self._engine, merged, wanted.seed),
            policy=self.policy,
            limits=self._limits,
            storage=self._storage,
        )
        task = Task(id=name, environment="tools", data={"messages": [to_wire(message) for message in messages]})
        trajectory = await session.run(EpisodeRequest(task=task, run_id=self._run_id, group_id=name, sampling=wanted))
        answer = trajectory.evidence.get("answer")
        if not isinstance(answer, str) or trajectory.failure is not None:
            answer = None
        return AgentResult(answer=answer, trajectory=trajectory)

    async def stream(
        self, messages: Sequence[Message], *, sampling: SamplingParams | None = None, name: str = ""
    ) -> AsyncGenerator[AgentEvent]:
        """Like ``run``, but yields events during the episode. Closing the iterator cancels it."""
        events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        episode = asyncio.create_task(self.run(messages, sampling=sampling, name=name, listener=events.put_nowait))
        episode.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield episode.result()
        finally:
            episode.cancel()
            await asyncio.wait({episode})

    async def aclose(self) -> None:
        """Close the engine, if it can be closed, and the storage."""
        for close in (getattr(self._engine, "aclose", None), getattr(self._storage, "close", None)):
            if close is not None:
                await close()


class PolicyConfig(Frozen):
    """A served policy with its tools, and its limits."""

    base_url: HttpUrl = Field(min_length=1, description="model server, up to and including /v1")
    model: str = Field(min_length=1, description="served model name, such as policy-v000007")
    base_model: str = Field(default="", description="name of the adapter's base model; unset: the model itself")
    upstream_key_env: VariableName = Field(default="", description="environment variable with the model server's key")
    tools: tuple[str, ...] = Field(default=(), description="think, final or module:Class; none: a plain conversation")
    template: str = Field(
        default="", description="family whose calls stand in the text (qwen3, ...); unset: the server reads them"
    )
    opens_thought: bool = Field(
        default=False,
        description="true for a model whose prompt ends with <think>, behind a server that leaves thoughts in answers",
    )
    system_prompt: str | None = Field(default=None, description="system message in place of the built-in one")
    max_turns: int = Field(default=32, ge=1, description="model responses per request")
    max_tokens: int = Field(default=2048, ge=1, description="tokens of one model response")
    timeout: float = Field(default=600.0, gt=0, description="seconds for one request")
    temperature: float | None = Field(default=None, ge=0, le=10, description="unset: the server's own")
    record: str = Field(default="", description="folder of a file store in which every conversation is recorded")
    run_id: str = Field(default="agent", min_length=1, max_length=200, description="run that the records belong to")


def open_runtime(config: PolicyConfig) -> AgentRuntime:
    """Close it with ``aclose`` on the event loop of its requests.

    Raises ``ConfigError`` for invalid tools, an invalid template or a missing key.
    """
    engine = OpenAIEngine(
        config.model,
        config.base_url,
        base_model=config.base_model or None,
        timeout=config.timeout,
        api_key=named_key(config.upstream_key_env, "upstream_key_env"),
    )
    return AgentRuntime(
        engine,
        policy=PolicyRef.from_served_name(engine.base_model, config.model),
        options=ToolOptions.model_validate(config.model_dump(include=set(ToolOptions.model_fields))),
        limits=Limits(max_turns=config.max_turns, max_response_length=config.max_tokens, timeout=config.timeout),
        sampling=SamplingParams(temperature=config.temperature),
        storage=registry.build("storages", "file", {"path": config.record}) if config.record else None,
        run_id=config.run_id,
    )


def build_app(model: str, runtime: AgentRuntime) -> Starlette:
    """The ASGI application, which serves the agent as ``model``; the end of its lifespan closes the runtime.

    A stream also contains the text before each tool call, as separate paragraphs.
    """

    async def chat(request: Request) -> Response:
        body = await read_body(await request.body(), AgentCompletionRequest.model_validate_json)
        if body.model and body.model != model:
            raise NotFound(f"The model '{body.model:.200}' does not exist; this is '{model}'.", param="model")
        name = uuid.uuid4().hex  # the task id of the recorded episode
        conversation = tuple(to_message(message.wire) for message in body.messages)
        asked: Any = {"messages": conversation, "sampling": body.sampling(), "name": name}
        if body.stream:
            events = runtime.stream(**asked)
            head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": now(), "model": model}
            return StreamingResponse(_sse(events, head, body.with_usage), media_type="text/event-stream")
        result = _checked(await unless_disconnected(request, runtime.run(**asked)))
        choice = {"index": 0, "message": assistant_body(result.answer, ()), "logprobs": None, **result.end}
        return json_response(chat_body(f"chatcmpl-{name}", model, [choice], _usage(result)))

    async def models(_: Request) -> Response:
        return json_response(models_body([{"id": model, "root": model}]))

    async def health(_: Request) -> Response:
        return Response()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await runtime.aclose()

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS, lifespan=lifespan)


async def _sse(events: AsyncGenerator[AgentEvent], head: Body, with_usage: bool) -> AsyncIterator[str]:
    """All events up to and including ``[DONE]``. The episode is cancelled when the client disconnects."""

    def chunk(*, end: Body | None = None, **delta: object) -> str:
        return sse_event(chunk_body(head, [chunk_choice(0, delta=delta, **(end or {}))]))

    try:
        async with aclosing(events):
            yield chunk(role="assistant", content="")
            async for event in events:
                match event:
                    case TurnText():
                        yield chunk(content=f"{event.text}\n\n")
                    case ToolCallStarted() | ToolResult():
                        fields = event.model_dump(exclude={"call_id"})
                        kind = "started" if isinstance(event, ToolCallStarted) else "result"
                        yield chunk(tool_event={"event": kind, "id": event.call_id, **fields})
                    case AgentResult():
                        answer = _checked(event).answer
                        yield chunk(end=event.end, **({"content": answer} if answer else {}))
                        if with_usage:
                            yield sse_event(chunk_body(head, [], usage=_usage(event)))
    except RLError as error:
        status, kind = getattr(error, "status", 500), getattr(error, "kind", "InternalServerError")
        yield sse_event(error_body(status, str(error), kind))
    yield SSE_DONE


def _usage(result: AgentResult) -> Body:
    """Token usage of the whole episode."""
    return usage_body(result.trajectory.usage.prompt_tokens, result.trajectory.usage.completion_tokens)


def _checked(result: AgentResult) -> AgentResult:
    """The result. Raises ``ServingError`` for a failure."""
    if (failure := result.failure) is not None:
        raise (Overloaded if failure.kind is FailureKind.INFRASTRUCTURE else UpstreamFailure)(failure.message)
    return result


@contextmanager
def running_agent(config: ServerConfig, policy: PolicyConfig, runtime: AgentRuntime | None = None) -> Iterator[str]:
    """A server in a background thread; yields its URL, without ``/v1``.

    ``config``: its address and bounds. ``runtime``: the agent, which is closed at the end; by default that of
    ``policy``. Raises ``ConfigError`` for invalid options.
    """
    access, agent = config.access(), runtime or open_runtime(policy)
    with (
        listening(config.host, config.port) as listener,
        serving(
            build_app(policy.model, agent),
            listener,
            access=access,
            max_body_bytes=config.max_body_bytes,
            lifespan="on",
        ) as url,
    ):
        yield url
