"""Bodies that the server answers with, in OpenAI's shape with vLLM's extensions."""

from __future__ import annotations

import time
import uuid
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(frozen=True)


def new_id(prefix: str) -> str:
    """A fresh identifier such as ``chatcmpl-...``."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


class PromptTokensDetails(Answer):
    """Where prompt tokens came from."""

    cached_tokens: int


class UsageInfo(Answer):
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TokenLogprob(Answer):
    """One token's text, natural-log probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    """A sampled token with its alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """The sampled tokens' logprobs, one element per token."""

    content: list[ContentLogprob]


class PromptLogprob(Answer):
    """A prompt token's (or an alternative's) place in the distribution; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CalledFunction(Answer):
    """The function that the model calls; ``arguments`` is JSON text as the model wrote it."""

    name: str
    arguments: str


class AnsweredToolCall(Answer):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class DeltaToolCall(AnsweredToolCall):
    """A call in a streamed answer; sent whole."""

    index: int


class AssistantMessage(Answer):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredToolCall] | None = None


class ChatCompletionChoice(Answer):
    """One sampled answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatCompletionResponse(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[ChatCompletionChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class DeltaMessage(Answer):
    """What is new in a streamed message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatCompletionChunkChoice(Answer):
    """What is new in one streamed choice."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None

    @model_serializer(mode="wrap")
    def _keep_finish_reason(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Empty fields are left out of events, but readers expect this one in each."""
        return {"finish_reason": None} | handler(self)


class ChatCompletionChunk(Answer):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Answer):
    """The sampled tokens' logprobs in the older form: parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Answer):
    """One sampled continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @model_serializer(mode="wrap")
    def _keep_finish_reason(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Empty fields are left out of events, but readers expect this one in each."""
        return {"finish_reason": None} | handler(self)


class CompletionResponse(Answer):
    """The answer, or one streamed event, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class TokenizeResponse(Answer):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class ModelCard(Answer):
    """The base model or an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=now)
    owned_by: str = "openhands_rl_plugin"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(Answer):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorInfo(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(Answer):
    """The body of every refusal."""

    error: ErrorInfo
