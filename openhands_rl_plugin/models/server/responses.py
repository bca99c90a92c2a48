"""Response bodies: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

import time
import uuid
from typing import Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from openhands_rl_plugin.models.server.requests import MessageToolCall, OpenAIModel


def new_id(prefix: str) -> str:
    """A new identifier such as ``chatcmpl-...``."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


class PromptTokensDetails(OpenAIModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class UsageInfo(OpenAIModel):
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TokenLogprob(OpenAIModel):
    """One token's text, natural-log probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    """A sampled token with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(OpenAIModel):
    """The sampled tokens' logprobs, one element per token."""

    content: list[ContentLogprob]


class PromptLogprob(OpenAIModel):
    """Logprob and rank of a prompt token or of an alternative; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class DeltaToolCall(MessageToolCall):
    """A tool call in a streamed response, complete in one chunk."""

    index: int


class AssistantMessage(OpenAIModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatCompletionChoice(OpenAIModel):
    """One sampled choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatCompletionResponse(OpenAIModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[ChatCompletionChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class DeltaMessage(OpenAIModel):
    """The fields of a message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatCompletionChunkChoice(OpenAIModel):
    """The part of one choice in a chunk."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None

    @model_serializer(mode="wrap")
    def _keep_finish_reason(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Chunks omit empty fields, but clients expect ``finish_reason`` in each."""
        return {"finish_reason": None} | handler(self)


class ChatCompletionChunk(OpenAIModel):
    """One chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(OpenAIModel):
    """The sampled tokens' logprobs as parallel lists, the format of /v1/completions."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(OpenAIModel):
    """One choice of a text completion."""

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
        """Chunks omit empty fields, but clients expect ``finish_reason`` in each."""
        return {"finish_reason": None} | handler(self)


class CompletionResponse(OpenAIModel):
    """Response, or one chunk of a stream, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=now)
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class TokenizeResponse(OpenAIModel):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class UpdateWeightsResponse(OpenAIModel):
    """Response of /update_weights_from_disk."""

    success: bool
    message: str


class ModelCard(OpenAIModel):
    """The base model or an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=now)
    owned_by: str = "openhands_rl_plugin"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(OpenAIModel):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorInfo(OpenAIModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(OpenAIModel):
    """Body of every error response."""

    error: ErrorInfo
