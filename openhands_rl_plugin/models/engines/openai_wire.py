"""The OpenAI chat format: builds requests, and parses responses with the token ids of vLLM, SGLang and ``serve``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import (
    NEUTRAL_PARAMETERS,
    altering_parameters,
    error_in,
    finish_in,
    logprobs_in,
    reasoning_in,
    to_message,
    to_wire,
    usage_in,
    whole_json,
)
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, PolicyRef, SamplingParams, Tokens, Usage

Json = dict[str, Any]
TOKEN_IDS, LOGPROBS = "return_token_ids", "logprobs"
PROMPT_IDS, SAMPLED_IDS = IDS = ("prompt_token_ids", "token_ids")
DONE = b"[DONE]"

DEEPEST = 100
"""Levels of nesting. Pydantic reads 200 from a store, and what is recorded is wrapped in some more."""

ELSEWHERE = "provider_specific_fields"  # where litellm puts fields that are not part of OpenAI's format
_ASKED_FOR = frozenset({*IDS, LOGPROBS})
_RECORDED_ELSEWHERE = frozenset({"choices", "object", "model", *IDS})
_IN_MESSAGE = ("role", "content", "tool_calls", "function_call", ELSEWHERE)


def request_body(
    model: str, messages: Sequence[Message], *, tools: Sequence[JsonObject], sampling: SamplingParams
) -> JsonObject:
    """The body of ``POST /chat/completions``; parameters that ``sampling`` does not set are omitted, and so are neutral
    values beyond OpenAI's own parameters (``client.EXTENSIONS``)."""
    body: JsonObject = {"model": model, "messages": [to_wire(message) for message in messages]}
    body |= sampling.model_dump(exclude_none=True, exclude={"stop", *NEUTRAL_PARAMETERS})
    body |= altering_parameters(dict(sampling))
    if tools:
        body["tools"] = list(tools)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def parsed(text: bytes) -> Any:
    """JSON in whole characters; ``None`` for text that is none."""
    with suppress(ValueError):
        return orjson.loads(text)
    with suppress(ValueError, RecursionError):  # orjson refuses half surrogates, NaN and deep nesting
        return whole_json(json.loads(text))
    return None


def parse_object(text: bytes) -> Json | None:
    """The object, or ``None`` when ``text`` is not a JSON object, or one of more than ``DEEPEST`` levels."""
    found = parsed(text)
    return found if isinstance(found, dict) and not too_deep(found) else None


def too_deep(value: object, levels: int = DEEPEST) -> bool:
    """Whether a JSON value has more than so many levels of arrays and objects."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nested = {dict, list}.intersection(map(type, inside))  # quick for an array of 35,000 token ids
    return bool(nested) and (levels == 1 or any(too_deep(each, levels - 1) for each in inside if type(each) in nested))


def dump_object(value: Mapping[str, Any]) -> bytes:
    """``value`` on one line, without spaces."""
    try:
        return to_json(value)
    except ValueError:  # half of a surrogate pair
        return json.dumps(value, separators=(",", ":")).encode()


def event(data: bytes, name: str = "") -> bytes:
    """One server-sent event."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % data


class Unrecordable(Exception):
    """A request or response cannot be recorded; ``str()`` is the reason, without any of its content."""


def reading[**P, T](what: str, read: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """What ``read`` makes of JSON of any structure: raises ``Unrecordable`` for one that is not expected."""
    try:
        return read(*given, **named)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise Unrecordable(f"{what} has an unknown format ({type(error).__name__})") from error


def without(document: Any, hidden: frozenset[str]) -> Any:
    """A completion or a chunk without the fields ``hidden``. A choice keeps ``logprobs``, as null, as where nobody asks
    for them."""
    if not isinstance(document, dict):
        return document
    kept = {name: value for name, value in document.items() if name not in hidden}
    if isinstance(choices := kept.get("choices"), list):
        kept["choices"] = [_shown(each, hidden) if isinstance(each, dict) else each for each in choices]
    return kept


def _shown(choice: Json, hidden: frozenset[str]) -> Json:
    kept = {name: value for name, value in choice.items() if name not in hidden}
    return kept | {LOGPROBS: None} if LOGPROBS in hidden and LOGPROBS in choice else kept


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One choice. ``tokens`` is ``None`` where the server returned no ids, or what are none; their logprobs are empty
    when they are missing, not finite, or not one per sampled id.

    ``extra`` has the other fields of the message, such as ``reasoning_content``.
    """

    message: Message
    finish_reason: str | None
    tokens: Tokens | None
    extra: JsonObject


def _choice(document: Json, choice: Json) -> ChatChoice:
    message = choice["message"]
    extra = {name: value for name, value in message.items() if name not in _IN_MESSAGE and value}
    if isinstance(message.get("content"), list) and (thought := reasoning_in(message)):
        extra["reasoning_content"] = thought
    read = to_message({**message, "role": "assistant"})
    return ChatChoice(read, finish_in(choice), _tokens(document, choice), extra)


def _tokens(document: Json, choice: Json) -> Tokens | None:
    prompt, sampled = prompt_ids_in(document, choice), choice.get(SAMPLED_IDS)
    if not isinstance(prompt, list) or not isinstance(sampled, list):
        return None
    try:
        return Tokens.of(prompt, sampled, logprobs_in(choice, len(sampled)))
    except ValueError:
        return None


class ChatAnswer:
    """A chat completion as a model server sent it. ``lost_ids``: some sampled tokens came without their ids."""

    def __init__(self, document: Json, *, lost_ids: bool = False) -> None:
        """Raises ``Unrecordable`` when ``document`` is not a chat completion, and ``ValueError`` and others."""
        choices = document.get("choices")
        if not isinstance(choices, list) or not choices or error_in(document) is not None:
            raise Unrecordable("the response is not a chat completion")
        self.document, self.lost_ids = document, lost_ids
        self.model = str(document.get("model") or "")
        self.usage = usage_in(document.get("usage"))
        self.choices = [_choice(document, each) for each in choices]

    @property
    def about(self) -> JsonObject:
        """The fields other than the choices: id, created, usage and those that the server adds."""
        shown = without(self.document, frozenset(IDS))
        return {name: value for name, value in shown.items() if name not in _RECORDED_ELSEWHERE and value}

    def plain(self) -> Json:
        """The response without token ids and logprobs."""
        return without(self.document, _ASKED_FOR)

    def completion(self, policy: PolicyRef, sampling: SamplingParams, metadata: JsonObject, at: int = 0) -> Completion:
        """That of the choice ``at``; the first one has the usage of all."""
        choice = self.choices[at]
        return Completion.model_construct(
            message=choice.message,
            tokens=choice.tokens,
            finish_reason=choice.finish_reason,
            usage=self.usage if at == 0 else Usage(),
            policy=policy,
            sampling=sampling,
            metadata=metadata,
        )


def chat_answer(body: bytes) -> ChatAnswer:
    """A whole response. Raises ``Unrecordable``, and ``ValueError`` and others."""
    document = parsed(body)
    # Most of what has levels are the logprobs, which are not stored as they are.
    is_read = isinstance(document, dict) and not too_deep(without(document, _ASKED_FOR))
    return ChatAnswer(document if is_read else {})


def prompt_ids_in(*holders: Mapping[str, Any]) -> Any:
    """The ids of the prompt, which stand in a response, or in one of its choices."""
    return next(filter(None, (holder.get(PROMPT_IDS) for holder in holders)), None)
