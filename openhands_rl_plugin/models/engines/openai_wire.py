"""The OpenAI chat format: builds requests, and parses responses with token ids in any of their usual places.

The response to a prompt of 35,000 tokens has a quarter of a megabyte, nearly all of it prompt ids, most of which a
gateway already has. So arrays of ids stay text, which is compared with that of earlier prompts, and only the new part
is parsed. The canonical text of ids is ``"17,4,256,"``: no spaces, a comma after each, so that the text of an extended
prompt starts with the text of the earlier one, and a prefix never ends inside a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import (
    NEUTRAL_PARAMETERS,
    altering_parameters,
    error_in,
    finish_in,
    logprobs_in,
    reasoning_in,
    text_of,
    to_message,
    to_wire,
    usage_in,
    whole_json,
)
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, PolicyRef, SamplingParams, Tokens, Usage
from openhands_rl_plugin.models.engines.chunks import ChunkAssembler, EventStreamReader, Json, array_in, places_of_ids

PROMPT_IDS, SAMPLED_IDS = IDS = ("prompt_token_ids", "token_ids")

# A quote inside of a JSON text has a backslash before it, so this is always the end of a field's name.
_NAME = b'token_ids"'
_OPENING = re.compile(rb"\s*:\s*\[")
_NUMBERS = TypeAdapter(list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]])
_IN_MESSAGE = ("role", "content", "tool_calls", "function_call", "provider_specific_fields")


def arrays_as_texts(body: bytes) -> tuple[bytes, int]:
    """JSON with the text ``"1,2"`` for every array ``[1,2]`` of ids, and how many arrays these are."""
    parts: list[bytes] = []
    done = at = 0
    while (at := body.find(_NAME, at) + len(_NAME)) >= len(_NAME):
        if (opened := _OPENING.match(body, at)) is None:
            continue
        start = opened.end()
        end = body.find(b"]", start, body.find(b'"', start))
        if end >= 0 and body.find(b"[", start, end) < 0:
            inside = body[start:end]
            if b" " in inside or b"\n" in inside:
                inside = inside.translate(None, b" \t\r\n")
            parts += body[done : start - 1], b'"%s"' % inside
            done = at = end + 1
    return (b"".join((*parts, body[done:])), len(parts) // 2) if parts else (body, 0)


def text_of_ids(array: object) -> str | None:
    """The canonical text of an array of ids, or of one that is a text; ``None`` for another value."""
    inside = str(array)[1:-1].replace(" ", "") if isinstance(array, list | tuple) else array
    return None if not isinstance(inside, str) else f"{inside}," if inside else ""


def ids_in(text: str) -> list[int] | None:
    """The ids in canonical text, or ``None`` when it contains anything but ids of up to 31 bits."""
    try:
        return _NUMBERS.validate_json(f"[{text[:-1]}]")
    except ValidationError:
        return None


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


def parsed(text: bytes) -> Any:
    """JSON in whole characters; ``None`` for text that is none."""
    try:
        return from_json(text)
    except ValueError:
        try:
            return whole_json(json.loads(text))
        except (ValueError, RecursionError):
            return None


def parsed_completion(body: bytes) -> Any:
    """As ``parsed``, with arrays of token ids as texts."""
    rest, count = arrays_as_texts(body)
    document = parsed(rest)
    if count and count > sum(isinstance(each, str) for each in _arrays(document)):
        return parsed(body)  # one stands where no ids are expected
    return document


def _arrays(document: Any) -> Iterator[object]:
    """The values of all fields that may be arrays of ids."""
    choices = document.get("choices") if isinstance(document, dict) else None
    for holder in (document, *(choices if isinstance(choices, list) else ())):
        for place in places_of_ids(holder) if isinstance(holder, dict) else ():
            yield from (place.get(name) for name in IDS)


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One choice. ``prompt`` and ``sampled`` are canonical texts of ids, ``None`` when the server returned none.

    ``logprobs`` has one for each sampled id, or none. ``extra`` has the other fields of the message,
    such as ``reasoning_content``.
    """

    message: Message
    finish_reason: str | None
    prompt: str | None
    sampled: str | None
    logprobs: tuple[float, ...]
    extra: JsonObject


def choices_in(document: Json) -> list[ChatChoice]:
    """The choices of a chat completion. Raises ``ValueError`` and others when it is none."""
    return [_choice(document, choice) for choice in document["choices"]]


def _choice(document: Json, choice: Json) -> ChatChoice:
    message = choice["message"]
    prompt, sampled = (text_of_ids(array_in(name, choice, document)) for name in IDS)
    extra = {name: value for name, value in message.items() if name not in _IN_MESSAGE and value}
    if isinstance(message.get("content"), list) and (thought := reasoning_in(message)):
        extra["reasoning_content"] = thought
    return ChatChoice(
        message=to_message({**message, "role": "assistant"}),
        finish_reason=finish_in(choice),
        prompt=prompt,
        sampled=sampled,
        logprobs=logprobs_in(choice, (sampled or "").count(",")),
        extra=extra,
    )


class AnsweredError(InfrastructureError):
    """The server answered an error: by its HTTP status, or in a body of 200 or a stream, where ``status`` is the one
    that its code stands for. ``pause``: seconds after which it wants to be asked again."""

    def __init__(self, status: int, message: str, body: bytes = b"", pause: float | None = None) -> None:
        super().__init__(f"the model server answered an error of {status}: {message}")
        self.status, self.message, self.body, self.pause = status, message, body or message.encode(), pause


def completions_from(
    content: bytes, base_model: str, model: str, sampling: SamplingParams, *, attempts: int = 1
) -> list[Completion]:
    """Parse a response; one completion per choice. Raises ``AnsweredError``, and ``ModelError`` for anything else that
    is not a chat completion.

    ``tokens`` is ``None`` without token ids; its logprobs are empty when they are missing, not finite, or not one per
    sampled id. The first completion has the usage of the whole request.
    """
    with _reads(content):
        document = parsed_completion(content)
        _check(document)
        choices = choices_in(document)
        if not choices:
            raise ValueError("there are no choices")
    policy = PolicyRef.from_served_name(base_model, str(document.get("model") or model))
    if policy.adapter is None:
        policy = PolicyRef.from_served_name(base_model, model)
    about: JsonObject = {"response_id": str(document.get("id") or ""), "attempts": attempts}
    return [
        Completion(
            message=_stripped(choice.message),
            tokens=_tokens(choice),
            finish_reason=choice.finish_reason,
            usage=usage_in(document.get("usage")) if at == 0 else Usage(),
            policy=policy,
            sampling=sampling,
            metadata={**about, **({"reasoning_content": text} if (text := reasoning_in(choice.extra)) else {})},
        )
        for at, choice in enumerate(choices)
    ]


@contextmanager
def _reads(content: bytes) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        shown = " ".join(content[:400].decode("utf-8", errors="replace").split())[:200]
        raise ModelError(f"the model server's answer is not a chat completion (check base_url): {shown}") from error


def _check(document: Any) -> None:
    if (problem := error_in(document)) is not None:
        raise AnsweredError(*problem)


def _stripped(message: Message) -> Message:
    if not message.tool_calls or message.content is None:
        return message
    # Templates insert white space between text and calls; it cannot be distinguished from that of the model.
    return message.model_copy(update={"content": message.content.strip() or None})


def _tokens(choice: ChatChoice) -> Tokens | None:
    if choice.prompt is None or choice.sampled is None:
        return None
    prompt, sampled = ids_in(choice.prompt), ids_in(choice.sampled)
    if prompt is None or sampled is None:
        raise ModelError("a token id of the model server's answer is negative or over 31 bits; repair the server")
    return Tokens(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=choice.logprobs)


DONE = b"[DONE]"


class StreamedAnswer(ChunkAssembler):
    """Parses the bytes of an event stream with one choice."""

    def __init__(self) -> None:
        super().__init__()
        self._events = EventStreamReader()
        self._done = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The text of all events that ``data`` completes. Raises ``ModelError`` and ``InfrastructureError``."""
        for event in self._events.feed(data):
            self._done |= event.data == DONE
            if self._done or not event.data:
                continue
            with _reads(event.data):
                chunk = parsed(event.data)
                _check(chunk)
                self.add(chunk)
                deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or () if not choice.get("index")]
                text = "".join(text_of(delta.get("content")) or "" for delta in deltas)
            if text:
                yield text

    def whole(self) -> bytes:
        """The response as if it had not been streamed. Raises ``InfrastructureError`` when the stream is incomplete."""
        if not self._done and not self.finished:
            raise InfrastructureError("the stream of the model server ended before its answer did")
        return json.dumps(self.document()).encode()
