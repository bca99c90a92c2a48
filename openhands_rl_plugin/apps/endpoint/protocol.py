"""Request and response bodies of the agent endpoint: OpenAI's chat format, with the agent's own tools."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from openhands_rl_plugin.apps.endpoint.events import AgentResult
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.types import Message, SamplingParams
from openhands_rl_plugin.environments.tools.environment import ToolCallStarted, ToolResult
from openhands_rl_plugin.models.server.requests import LARGEST, Messages, ModelName, OpenAIModel, StreamOptions
from openhands_rl_plugin.models.server.responses import (
    AssistantMessage,
    ChatCompletionChoice,
    ChatCompletionChunk,
    ChatCompletionChunkChoice,
    ChatCompletionResponse,
    DeltaMessage,
    UsageInfo,
)

ToolEventName = Literal["started", "result"]


class AgentCompletionRequest(OpenAIModel):
    """POST /v1/chat/completions. ``seed`` applies to the episode, ``max_tokens`` to each model response."""

    messages: Annotated[Messages, Field(min_length=1)]
    model: ModelName | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=LARGEST)
    tools: tuple[object, ...] | None = None

    @model_validator(mode="after")
    def _reject_unsupported(self) -> Self:
        if self.tools:
            raise ValueError("tools are the agent's own; remove `tools` from the request")
        if self.n not in (None, 1):
            raise ValueError("n must be 1; send one request per answer")
        unknown = {message.role for message in self.messages} - {"system", "developer", "user", "assistant", "tool"}
        if unknown:
            raise ValueError(f"unknown role {sorted(unknown)[0]!r:.100}; use system, user, assistant or tool")
        return self

    def conversation(self) -> tuple[Message, ...]:
        """The messages as ``Message`` values. The role ``developer`` becomes ``system``."""
        return tuple(
            to_message(
                message.model_dump(exclude={"content", "role"})
                | {"content": message.text, "role": "system" if message.role == "developer" else message.role}
            )
            for message in self.messages
        )

    def sampling(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
        )


class ToolEventDelta(OpenAIModel):
    """A tool call or its result in a stream."""

    event: ToolEventName
    id: str
    name: str
    arguments: str | None = None
    content: str | None = None
    ok: bool | None = None


class AgentDelta(DeltaMessage):
    """The fields that a chunk adds to the message."""

    tool_event: ToolEventDelta | None = None


class AgentChunkChoice(ChatCompletionChunkChoice):
    """The only choice of a chunk. Its ``delta`` is an ``AgentDelta``, serialised with all of its fields."""

    delta: SerializeAsAny[DeltaMessage]


class AgentChunk(ChatCompletionChunk):
    """One chunk of a streamed response."""

    choices: list[AgentChunkChoice]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen, so never written to)


def tool_event_delta(event: ToolCallStarted | ToolResult) -> ToolEventDelta:
    """A tool event as a field of a chunk."""
    if isinstance(event, ToolCallStarted):
        return ToolEventDelta(event="started", id=event.call_id, name=event.name, arguments=event.arguments)
    return ToolEventDelta(event="result", id=event.call_id, name=event.name, content=event.content, ok=event.ok)


def finish_reason(result: AgentResult) -> str:
    """``stop`` for an answer, ``length`` when a limit truncated it or ended the episode."""
    return "stop" if result.answer is not None and not result.cut else "length"


def stop_reason(result: AgentResult) -> str | None:
    """The reason why there is no answer; ``None`` with an answer."""
    return None if result.answer is not None else result.stop.value


def usage_of(result: AgentResult) -> UsageInfo:
    """Token usage of the whole episode."""
    usage = result.trajectory.usage
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def completion_response(identifier: str, model: str, result: AgentResult) -> ChatCompletionResponse:
    """The body of a response that is not streamed."""
    choice = ChatCompletionChoice(
        index=0,
        message=AssistantMessage(content=result.answer),
        logprobs=None,
        finish_reason=finish_reason(result),
        stop_reason=stop_reason(result),
        token_ids=None,
    )
    return ChatCompletionResponse(id=identifier, model=model, choices=[choice], usage=usage_of(result))
