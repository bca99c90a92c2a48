"""The OpenAI chat format: builds requests, and parses responses with token ids in any of their usual places."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters, to_wire, whole_text
from openhands_rl_plugin.core.types import (
    Completion,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Tokens,
    ToolCall,
    Usage,
)
from openhands_rl_plugin.models.engines.chunks import ChunkAssembler, EventStreamReader

_IDS_END = 2**63  # the largest integer of the storages


def request_body(
    model: str, messages: Sequence[Message], *, tools: Sequence[JsonObject], n: int, sampling: SamplingParams
) -> JsonObject:
    """The body of ``POST /chat/completions``; parameters that ``sampling`` does not set are omitted, and so are neutral
    values beyond OpenAI's own parameters (``extensions.SAMPLING``)."""
    body: JsonObject = {"model": model, "messages": [to_wire(message) for message in messages]}
    if n != 1:
        body["n"] = n
    if tools:
        body["tools"] = list(tools)
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        if (value := getattr(sampling, name)) is not None:
            body[name] = value
    body |= altering_parameters({name: getattr(sampling, name) for name in NEUTRAL_PARAMETERS})
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def _whole(value: object) -> object:
    return whole_text(value) if isinstance(value, str) else value


def _storable(ids: tuple[int, ...]) -> tuple[int, ...]:
    if ids and not 0 <= min(ids) <= max(ids) < _IDS_END:
        raise ModelError("the model server's answer has a token id that is negative or over 63 bits; repair the server")
    return ids


Text = Annotated[str, BeforeValidator(_whole)]
TokenIds = Annotated[tuple[int, ...], AfterValidator(_storable)] | None


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Fields(_Wire):
    """Token ids; proxies (litellm) put them in ``provider_specific_fields``."""

    prompt_token_ids: TokenIds = None
    token_ids: TokenIds = None


class _Function(_Wire):
    name: Text
    arguments: Text = "{}"


class _Call(_Wire):
    id: Text | None = None
    function: _Function


class _AnswerMessage(_Wire):
    content: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: tuple[_Call, ...] | None = None
    provider_specific_fields: _Fields | None = None


class _TokenLogprob(_Wire):
    logprob: float | None = None


class _Logprobs(_Wire):
    content: tuple[_TokenLogprob, ...] | None = None


class _Choice(_Fields):
    message: _AnswerMessage
    finish_reason: Text | None = None
    logprobs: _Logprobs | None = None
    provider_specific_fields: _Fields | None = None


class _PromptDetails(_Wire):
    cached_tokens: int | None = None


class _Usage(_Wire):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(_Fields):
    id: Text = ""
    model: Text | None = None
    choices: tuple[_Choice, ...] = Field(min_length=1)
    usage: _Usage | None = None
    provider_specific_fields: _Fields | None = None


def completions_from(
    content: bytes, base_model: str, model: str, sampling: SamplingParams, *, attempts: int = 1
) -> list[Completion]:
    """Parse a response; one completion per choice. Raises ``ModelError`` for anything that is not a chat completion.

    ``tokens`` is ``None`` without token ids; its logprobs are empty when they are missing, not finite, or not one per
    sampled id. The first completion has the usage of the whole request.
    """
    try:
        answer = _Answer.model_validate(json.loads(content))
    except (ValidationError, ValueError, RecursionError) as error:
        shown = " ".join(content[:400].decode("utf-8", errors="replace").split())[:200]
        raise ModelError(f"the model server's answer is not a chat completion (check base_url): {shown}") from error
    policy = PolicyRef.from_served_name(base_model, answer.model or model)
    if policy.adapter is None:
        policy = PolicyRef.from_served_name(base_model, model)
    return [
        Completion(
            message=_message(choice.message),
            tokens=_tokens(answer, choice),
            finish_reason=choice.finish_reason,
            usage=_usage(answer.usage) if at == 0 else Usage(),
            policy=policy,
            sampling=sampling,
            metadata={"response_id": answer.id, "attempts": attempts, **_reasoning(choice.message)},
        )
        for at, choice in enumerate(answer.choices)
    ]


def _message(message: _AnswerMessage) -> Message:
    calls = tuple(
        ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    content = message.content
    if calls and content is not None:
        # Templates insert white space between text and calls; it cannot be distinguished from that of the model.
        content = content.strip() or None
    return Message(role="assistant", content=content, tool_calls=calls)


def _reasoning(message: _AnswerMessage) -> JsonObject:
    thought = message.reasoning_content or message.reasoning
    return {"reasoning_content": thought} if thought else {}


def _tokens(answer: _Answer, choice: _Choice) -> Tokens | None:
    places = [place for place in _places(answer, choice) if place is not None]
    prompt = next((place.prompt_token_ids for place in places if place.prompt_token_ids is not None), None)
    sampled = next((place.token_ids for place in places if place.token_ids is not None), None)
    if prompt is None or sampled is None:
        return None
    return Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=_logprobs(choice.logprobs, len(sampled)))


def _places(answer: _Answer, choice: _Choice) -> Iterator[_Fields | None]:
    yield choice
    yield choice.provider_specific_fields
    yield choice.message.provider_specific_fields
    yield answer
    yield answer.provider_specific_fields


def _logprobs(logprobs: _Logprobs | None, expected: int) -> tuple[float, ...]:
    given = logprobs.content if logprobs is not None and logprobs.content is not None else ()
    values = tuple(token.logprob for token in given if token.logprob is not None and math.isfinite(token.logprob))
    return values if len(values) == len(given) == expected else ()


def _usage(usage: _Usage | None) -> Usage:
    if usage is None:
        return Usage(calls=1)
    details = usage.prompt_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        completion_tokens=usage.completion_tokens or 0,
        calls=1,
    )


DONE = b"[DONE]"


class StreamedAnswer:
    """Parses the bytes of an event stream with one choice."""

    def __init__(self) -> None:
        self._events = EventStreamReader()
        self._parts = ChunkAssembler()
        self._done = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The text of all events that ``data`` completes. Raises ``ModelError`` and ``InfrastructureError``."""
        for event in self._events.feed(data):
            if event.data and not self._done and (text := self._take(event.data)):
                yield text

    def whole(self) -> bytes:
        """The response as if it had not been streamed. Raises ``InfrastructureError`` when the stream is incomplete."""
        if not self._done and not self._parts.finished:
            raise InfrastructureError("the stream of the model server ended before its answer did")
        document = self._parts.document()
        return json.dumps({**document, "choices": document["choices"][:1]}).encode()

    def _take(self, data: bytes) -> str:
        if data == DONE:
            self._done = True
            return ""
        try:
            chunk = json.loads(data.decode("utf-8", errors="replace"))
            error = chunk.get("error")
            self._parts.add(chunk)
        except (ValueError, AttributeError, RecursionError) as problem:
            shown = " ".join(data[:200].decode("utf-8", errors="replace").split())
            raise ModelError(
                f"the model server's stream is not a chat completion (check base_url): {shown}"
            ) from problem
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else error
            raise InfrastructureError(f"the model server sent an error in its stream: {str(message)[:300]}")
        return "".join(_text(choice) for choice in chunk.get("choices") or () if choice.get("index", 0) == 0)


def _text(choice: dict[str, Any]) -> str:
    return whole_text((choice.get("delta") or {}).get("content") or "")
