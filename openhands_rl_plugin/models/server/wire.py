"""The bodies of requests, responses and errors: OpenAI's fields and vLLM's extensions. It imports no torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from openhands_rl_plugin.core.messages import calls_in
from openhands_rl_plugin.core.servers import error_response
from openhands_rl_plugin.core.templates import ParsedAnswer, parse_calls
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.models.generator.config import ServingError

if TYPE_CHECKING:  # torch and transformers take seconds to import, and clients of this module need neither
    from transformers import PreTrainedTokenizerFast

    from openhands_rl_plugin.models.generator.sequence import Generation, ScoredToken

Body = dict[str, Any]
"""A JSON object of a response."""
SSE_DONE = "data: [DONE]\n\n"
"""The last event of every stream."""


def json_response(body: Mapping[str, Any]) -> Response:
    """``body`` as a response."""
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")


def sse_event(body: Mapping[str, Any]) -> str:
    """``body`` as a server-sent event."""
    return f"data: {to_json(body, inf_nan_mode='null').decode()}\n\n"


async def unless_disconnected[T](request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``; raises ``ClientDisconnect``, with ``work`` cancelled, when the client disconnects."""
    working = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await working
    except asyncio.CancelledError:
        raise ClientDisconnect if watching.done() else asyncio.CancelledError from None
    finally:
        watching.cancel()


async def _on_error(_: Request, error: Exception) -> Response:
    """The response to an error; of an invalid body the first three problems. 499 (client left) is for the log."""
    match error:
        case ServingError():
            return error_response(error.status, error.message, error.kind, error.param)
        case ValidationError():
            problems = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:3]]
            first = error.errors()[0]["loc"]
            return error_response(400, "; ".join(problems), "BadRequestError", str(first[0]) if first else None)
        case HTTPException():  # an unknown path or method
            kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
            return error_response(error.status_code, error.detail, kind)
        case _:
            return Response(status_code=499)


ERROR_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = dict.fromkeys(
    (ServingError, ValidationError, HTTPException, ClientDisconnect), _on_error
)
"""The ``exception_handlers`` of a Starlette application."""

MAX_TOP_LOGPROBS = 20
LARGEST = 2**31 - 1
"""The bound of numbers without a narrower one: 32 bits fit wherever they are used."""
ModelName = Annotated[str, Field(max_length=1024)]
# A list ends at its first wrong element: a million of them would be a million errors.
TokenIds = Annotated[tuple[Annotated[int, Field(ge=-1, le=LARGEST)], ...], Field(fail_fast=True)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Stops = Annotated[tuple[_Stop, ...], Field(fail_fast=True), Field(max_length=16)]
_Zero = Annotated[float, Field(ge=0, le=0)]
_One = Annotated[float, Field(ge=1, le=1)]


class OpenAIModel(BaseModel):
    """Base of all request and response bodies."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ContentPart(OpenAIModel):
    """A part of a message: text, or reasoning, whose fields are its server's own."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "input_text", "output_text", "thinking", "redacted_thinking", "reasoning", "refusal"]


class ChatMessage(OpenAIModel):
    """One message of the conversation; its calls and its reasoning are read by ``core.messages``."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[tuple[ContentPart, ...], Field(fail_fast=True)] | None = None

    @property
    def wire(self) -> dict[str, Any]:
        """The message as it was sent."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        try:
            calls_in(self.wire)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError("tool_calls are not those of OpenAI's messages") from error
        return self


Messages = Annotated[tuple[ChatMessage, ...], Field(fail_fast=True), Field(max_length=10_000)]


class FunctionDefinition(OpenAIModel):
    """The function of a tool, with its description and parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str


class Tool(OpenAIModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class SamplingFields(OpenAIModel):
    """Sampling fields that chat and text completions share."""

    model: ModelName | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST, description="0 and -1 are off.")
    n: int | None = Field(None, ge=1, le=64)
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[_Stops, BeforeValidator(lambda it: (it,) if isinstance(it, str) else it or ())] = ()
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    presence_penalty: _Zero | None = None
    frequency_penalty: _Zero | None = None
    repetition_penalty: _One | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    logit_bias: dict[str, JsonValue] | None = Field(None, max_length=0)
    response_format: dict[Literal["type"], Literal["text"]] | None = None


class Conversation(OpenAIModel):
    """The fields that the chat template renders."""

    messages: Messages = Field(default=(), min_length=1)
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] | None = None


class ChatCompletionRequest(Conversation, SamplingFields):
    """POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    stream: bool | None = False
    stream_options: dict[str, JsonValue] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: Literal["none", "auto"] | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of a completion, if it says so."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that an answer may call."""
        return [tool.model_dump() for tool in self.tools or () if self.tool_choice != "none"]

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("when using `top_logprobs`, `logprobs` must be set to true.")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("`prompt_logprobs` are not available when `stream=True`.")
        return self


class CompletionRequest(SamplingFields):
    """POST /v1/completions. ``prompt``: a text, or a list of token ids."""

    prompt: str | TokenIds
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = Field(False, description="Not supported; `prompt_logprobs` are.")
    stream: Literal[False] | None = Field(False, description="Not supported; that of a chat is.")
    add_special_tokens: bool = True


class TokenizeRequest(Conversation):
    """POST /tokenize, with a text or a conversation."""

    model: ModelName | None = None
    prompt: str = ""
    add_special_tokens: bool = True


class UnloadRequest(OpenAIModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: ModelName


class LoadRequest(UnloadRequest):
    """POST /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=4096)


class Formatter:
    """Writes tokens as text. ``as_ids``: tokens in logprobs are written ``token_id:<id>`` (vLLM's option)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat_logprobs(self, sampled: Sequence[ScoredToken]) -> Body:
        """OpenAI's ``logprobs`` object of chat choices."""

        def entry(token: int, logprob: float) -> Body:
            text = self._text(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", errors="replace"))}

        return {
            "content": [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*each) for each in one.top]} for one in sampled
            ]
        }

    def chat_choice(self, index: int, answer: Generation, request: ChatCompletionRequest) -> Body:
        """A whole chat choice; tool calls are parsed when the request offered tools."""
        parsed = parse_tool_calls(answer.text, request.callable)
        return {
            "index": index,
            "message": assistant_body(parsed.content, parsed.calls),
            "logprobs": self.chat_logprobs(answer.sampled) if request.logprobs else None,
            "finish_reason": "tool_calls" if parsed.calls else answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": list(answer.token_ids) if request.return_token_ids else None,
        }

    def text_choice(self, index: int, answer: Generation, request: CompletionRequest) -> Body:
        """A whole text choice."""
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._text_logprobs(answer.sampled) if request.logprobs is not None else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "prompt_logprobs": self.prompt_logprobs(answer),
            "token_ids": list(answer.token_ids) if request.return_token_ids else None,
            "prompt_token_ids": list(answer.prompt_ids) if request.return_token_ids else None,
        }

    def prompt_logprobs(self, answer: Generation) -> list[Body | None] | None:
        """vLLM's shape: None for the first token, then the token (and alternatives) by id; rank 1 is the likeliest."""
        if answer.prompt is None:
            return None
        return [None if each is None else self._ranked(each) for each in answer.prompt]

    def _ranked(self, scored: ScoredToken) -> Body:
        ranked = [(*each, rank) for rank, each in enumerate(scored.top, 1)]
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._decode(token)}
            for token, logprob, rank in (*ranked, (scored.token, scored.logprob, scored.rank))
        }

    def _text_logprobs(self, sampled: Sequence[ScoredToken]) -> Body:
        """OpenAI's ``logprobs`` object; as in vLLM, the sampled token is always among the alternatives."""
        tokens = [self._text(one.token) for one in sampled]
        tops = [((one.token, one.logprob), *one.top) for one in sampled]
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
            "token_logprobs": [one.logprob for one in sampled],
            "tokens": tokens,
            "top_logprobs": [{self._text(token): logprob for token, logprob in top} for top in tops],
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._decode(token)

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def tool_call_bodies(calls: Sequence[ToolCall]) -> list[Body]:
    """Parsed calls with new identifiers."""
    return [
        {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def assistant_body(content: str | None, calls: Sequence[ToolCall]) -> Body:
    """The model's message."""
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": tool_call_bodies(calls) or None}


def usage(answers: Sequence[Generation]) -> Body:
    """Counts of a request's answers: the prompt once, all sampled tokens, prompt tokens from the prefix cache."""
    first, sampled = answers[0], sum(len(each.sampled) for each in answers)
    return {
        **usage_body(len(first.prompt_ids), sampled),
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


def usage_body(prompt: int, sampled: int) -> Body:
    """Token counts of a request, all choices together."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


def chat_body(identifier: str, model: str, choices: Sequence[Body], counts: Body, **more: object) -> Body:
    """The response of /v1/chat/completions."""
    head = {"id": identifier, "object": "chat.completion", "created": now(), "model": model}
    return {**head, "choices": choices, "usage": counts, **more}


def chunk_body(head: Body, choices: Sequence[Body], **more: object) -> Body:
    """One chunk of a streamed response; ``head``: its id, object, time and model. What is ``None`` is left out."""
    return {**head, "choices": choices, **present(more)}


def chunk_choice(index: int, finish_reason: str | None = None, **more: object) -> Body:
    """The part of one choice in a chunk. Clients expect ``finish_reason`` in each."""
    return {"index": index, "finish_reason": finish_reason, **present(more)}


def present(fields: Body) -> Body:
    """The fields that are not ``None``."""
    return {name: value for name, value in fields.items() if value is not None}


def models_body(cards: Sequence[Body]) -> Body:
    """The response of /v1/models; a card has an ``id`` and a ``root``, and an adapter a ``parent``."""
    head = {"object": "model", "created": now(), "owned_by": "openhands_rl_plugin", "parent": None}
    return {"object": "list", "data": [{**head, "max_model_len": None, **card} for card in cards]}


def new_id(prefix: str) -> str:
    """A new identifier such as ``chatcmpl-...``."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


class ParsedText(NamedTuple):
    """The text around the calls without white space at its ends (None when there is none), the calls, and the text as
    the model wrote it."""

    content: str | None
    calls: tuple[ToolCall, ...]
    text: str = ""


def parse_tool_calls(text: str, tools: Sequence[JsonObject]) -> ParsedText:
    """Split an answer to a request that offered ``tools`` into text and calls.

    Without tools, or if any call is malformed, everything is content.
    """
    parsed = parse_calls(text, tools) if tools else ParsedAnswer(text)
    if parsed.problems or not parsed.calls:
        return ParsedText(text, (), text)
    around = parsed.before + parsed.after
    return ParsedText(around.strip() or None, parsed.calls, around)


def answer_message(text: str, tools: Sequence[JsonObject], *, turn: int) -> Message:
    """The answer to a request that offered ``tools``, as the server gives it; ``turn`` numbers its calls."""
    parsed = parse_tool_calls(text, tools)
    calls = tuple(call.model_copy(update={"id": f"call_{turn}_{at}"}) for at, call in enumerate(parsed.calls))
    return Message(role="assistant", content=parsed.content, tool_calls=calls)
