"""Response bodies: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from openhands_rl_plugin.core.templates.json_calls import OPEN, parse_tool_call_json
from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.models.server.requests import CompletionRequest, FunctionCall, MessageToolCall, OpenAIModel

if TYPE_CHECKING:  # torch and transformers take seconds to import, and clients of this module need neither
    from transformers import PreTrainedTokenizerFast

    from openhands_rl_plugin.models.generator.sequence import Generation, SampledToken, ScoredToken


class Formatter:
    """Writes tokens as text. ``as_ids``: tokens in logprobs are written ``token_id:<id>`` (vLLM's option)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat_logprobs(self, sampled: Sequence[SampledToken]) -> ChatLogprobs:
        """OpenAI's ``logprobs`` object of chat choices."""
        return ChatLogprobs(
            content=[
                ContentLogprob(
                    **self._token(one.token, one.logprob).model_dump(),
                    top_logprobs=[self._token(token, logprob) for token, logprob in one.top],
                )
                for one in sampled
            ]
        )

    def text_logprobs(self, sampled: Sequence[SampledToken], offset: int) -> CompletionLogprobs:
        """OpenAI's ``logprobs`` object of text choices; ``offset`` is the text's length before these tokens.

        As in vLLM, the sampled token is always among the alternatives.
        """
        tokens = [self._text(one.token) for one in sampled]
        offsets = [offset]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return CompletionLogprobs(
            text_offset=offsets[: len(tokens)],
            token_logprobs=[one.logprob for one in sampled],
            tokens=tokens,
            top_logprobs=[
                {self._text(token): logprob for token, logprob in ((one.token, one.logprob), *one.top)}
                for one in sampled
            ],
        )

    def prompt_logprobs(self, observed: Sequence[ScoredToken | None] | None) -> PromptLogprobs | None:
        """vLLM's shape: None for the first token, then the token (and alternatives) by id."""
        if observed is None:
            return None
        return [None if one is None else self._prompt_entry(one) for one in observed]

    def chat_choice(
        self, index: int, answer: Generation, *, logprobs: bool, token_ids: bool, tools: bool
    ) -> ChatCompletionChoice:
        """A whole chat choice; tool calls are parsed when the request offered tools."""
        parsed = parse_tool_calls(answer.text) if tools else ParsedText(answer.text, ())
        return ChatCompletionChoice(
            index=index,
            message=AssistantMessage(content=parsed.content, tool_calls=tool_call_bodies(parsed.calls) or None),
            logprobs=self.chat_logprobs(answer.sampled) if logprobs else None,
            finish_reason="tool_calls" if parsed.calls else answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=list(answer.token_ids) if token_ids else None,
        )

    def text_choice(self, index: int, answer: Generation, request: CompletionRequest) -> CompletionChoice:
        """A whole text choice."""
        return CompletionChoice(
            index=index,
            text=answer.text,
            logprobs=self.text_logprobs(answer.sampled, 0) if request.logprobs is not None else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            prompt_logprobs=self.prompt_logprobs(answer.prompt),
            token_ids=list(answer.token_ids) if request.return_token_ids else None,
            prompt_token_ids=list(answer.prompt_ids) if request.return_token_ids else None,
        )

    def _prompt_entry(self, one: ScoredToken) -> dict[int, PromptLogprob]:
        entry = {
            token: PromptLogprob(logprob=logprob, rank=rank, decoded_token=self._decode(token))
            for rank, (token, logprob) in enumerate(one.top, 1)
        }
        entry[one.token] = PromptLogprob(logprob=one.logprob, rank=one.rank, decoded_token=self._decode(one.token))
        return entry

    def _token(self, token: int, logprob: float) -> TokenLogprob:
        text = self._text(token)
        return TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode("utf-8", errors="replace")))

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._decode(token)

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def tool_call_bodies(calls: Sequence[ToolCall]) -> list[MessageToolCall]:
    """Parsed calls with new identifiers."""
    return [
        MessageToolCall(id=new_id("call"), function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in calls
    ]


def usage(answers: Sequence[Generation], choices_per_prompt: int) -> UsageInfo:
    """Counts of a request's answers: each prompt once, all sampled tokens."""
    firsts = answers[::choices_per_prompt]
    prompt = sum(len(answer.prompt_ids) for answer in firsts)
    sampled = sum(len(answer.sampled) for answer in answers)
    return UsageInfo(
        prompt_tokens=prompt,
        completion_tokens=sampled,
        total_tokens=prompt + sampled,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(answer.cached_tokens for answer in firsts)),
    )


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


_OPEN = re.compile(re.escape(OPEN), re.IGNORECASE)


@dataclass(frozen=True)
class ParsedText:
    """The text around the calls without white space at its ends (None when there is none), and the calls.

    ``spoken`` is that text as the model wrote it: what a stream has sent is the beginning of it.
    """

    content: str | None
    calls: tuple[ToolCall, ...]
    spoken: str = ""


def parse_tool_calls(text: str) -> ParsedText:
    """Split an answer into text and calls. If any call is malformed, everything is left as content."""
    parsed = parse_tool_call_json(text)
    if parsed.problems or not parsed.calls:
        return ParsedText(text, (), text)
    spoken = parsed.before + parsed.after
    return ParsedText(spoken.strip() or None, parsed.calls, spoken)


def safe_length(text: str) -> int:
    """How much of an unfinished answer is surely plain content: up to a call or what may become one."""
    if match := _OPEN.search(text):
        return match.start()
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text[-length:].lower() == OPEN[:length]:
            return len(text) - length
    return len(text)
