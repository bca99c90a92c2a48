"""The OpenAI chat format: builds requests, and parses responses with token ids in any of their usual places."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

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
    whole_text,
)
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, PolicyRef, SamplingParams, Tokens, Usage
from openhands_rl_plugin.models.engines.chunks import ChunkAssembler, EventStreamReader, Json, places_of_ids

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


def _storable(ids: tuple[int, ...]) -> tuple[int, ...]:
    if ids and not 0 <= min(ids) <= max(ids) < _IDS_END:
        raise ModelError("the model server's answer has a token id that is negative or over 63 bits; repair the server")
    return ids


_TOKEN_IDS = TypeAdapter(Annotated[tuple[int, ...], AfterValidator(_storable)])


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
    try:
        document = json.loads(content)
        if (problem := error_in(document)) is not None:
            raise AnsweredError(*problem)
        read = [(choice, _message(choice["message"]), _tokens(document, choice)) for choice in document["choices"]]
        if not read:
            raise ValueError("there are no choices")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        shown = " ".join(content[:400].decode("utf-8", errors="replace").split())[:200]
        raise ModelError(f"the model server's answer is not a chat completion (check base_url): {shown}") from error
    policy = PolicyRef.from_served_name(base_model, whole_text(str(document.get("model") or model)))
    if policy.adapter is None:
        policy = PolicyRef.from_served_name(base_model, model)
    response_id = whole_text(str(document.get("id") or ""))
    return [
        Completion(
            message=message,
            tokens=tokens,
            finish_reason=finish_in(choice),
            usage=usage_in(document.get("usage")) if at == 0 else Usage(),
            policy=policy,
            sampling=sampling,
            metadata={"response_id": response_id, "attempts": attempts, **_reasoning(choice["message"])},
        )
        for at, (choice, message, tokens) in enumerate(read)
    ]


def _message(given: Json) -> Message:
    said = to_message({**given, "role": "assistant"})
    if said.tool_calls and said.content is not None:
        # Templates insert white space between text and calls; it cannot be distinguished from that of the model.
        return said.model_copy(update={"content": said.content.strip() or None})
    return said


def _reasoning(message: Json) -> JsonObject:
    thought = reasoning_in(message)
    return {"reasoning_content": whole_text(thought)} if thought else {}


def _tokens(answer: Json, choice: Json) -> Tokens | None:
    places = [*places_of_ids(choice), *places_of_ids(answer)]
    found = [
        next((ids for place in places if (ids := place.get(name)) is not None), None)
        for name in ("prompt_token_ids", "token_ids")
    ]
    if None in found:
        return None
    prompt, sampled = map(_TOKEN_IDS.validate_python, found)
    return Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=tuple(logprobs_in(choice, len(sampled))))


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
            if (error := error_in(chunk)) is not None:
                raise AnsweredError(*error)
            self._parts.add(chunk)
        except (ValueError, AttributeError, RecursionError) as problem:
            shown = " ".join(data[:200].decode("utf-8", errors="replace").split())
            raise ModelError(
                f"the model server's stream is not a chat completion (check base_url): {shown}"
            ) from problem
        return "".join(_text(choice) for choice in chunk.get("choices") or () if not choice.get("index"))


def _text(choice: dict[str, Any]) -> str:
    return whole_text(text_of((choice.get("delta") or {}).get("content")) or "")
