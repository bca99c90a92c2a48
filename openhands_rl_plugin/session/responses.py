"""Responses of the model server: the part that is recorded, and the part that the client gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from openhands_rl_plugin.core.messages import error_in, finish_in, logprobs_in, reasoning_in, to_message, usage_in
from openhands_rl_plugin.core.types import JsonObject, Message, Usage
from openhands_rl_plugin.models.engines.chunks import places_of_ids
from openhands_rl_plugin.session.requests import ClientRequest, Unrecordable
from openhands_rl_plugin.session.token_id_text import (
    PROMPT_IDS,
    SAMPLED_IDS,
    Json,
    StrippedBody,
    TokenIds,
    canonical,
    dump_object,
    ids_of,
    parse_object,
    strip_id_arrays,
    text_of,
    too_deep,
)

_IDS = (PROMPT_IDS, SAMPLED_IDS)
_ELSEWHERE = "provider_specific_fields"  # where litellm puts fields that are not part of OpenAI's format
_RECORDED_ELSEWHERE = frozenset({"choices", "object", "model", *_IDS})
_IN_MESSAGE = ("role", "content", "tool_calls", "function_call", _ELSEWHERE)


@with_config(ConfigDict(extra="ignore"))
class _TokenLogprob(TypedDict):
    logprob: float


@with_config(ConfigDict(extra="allow"))
class _Logprobs(TypedDict):
    content: NotRequired[list[_TokenLogprob] | None]


@with_config(ConfigDict(extra="allow"))
class _Choice(TypedDict):
    logprobs: NotRequired[_Logprobs | None]


@with_config(ConfigDict(extra="allow"))
class _Answer(TypedDict):
    choices: list[_Choice]


_ANSWER = TypeAdapter(_Answer)
"""A response of which only the ``logprob`` of each sampled token is read: the other fields are most of the text."""


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """One choice. ``prompt`` is the inside of the array of prompt ids, ``None`` when the server returned no ids.

    ``logprobs`` has one for each of ``sampled``, or none. ``extra`` has the other fields of the message,
    such as ``reasoning_content``.
    """

    message: Message
    finish_reason: str | None
    prompt: bytes | None
    sampled: TokenIds
    logprobs: list[float]
    extra: JsonObject


class UpstreamResponse:
    """A chat completion as the model server sent it."""

    def __init__(self, body: bytes) -> None:
        """Raises ``Unrecordable`` when ``body`` is not a chat completion."""
        self._body = body
        self._cut = strip_id_arrays(body)
        document = _read(self._cut.rest)
        if document is not None and len(self._cut.texts) > sum(map(self._is_array, _arrays(document))):
            # An array of that name was cut out at an unknown place.
            self._cut, document = StrippedBody(body), _read(body)
        choices = document.get("choices") if document is not None else None
        if document is None or not isinstance(choices, list) or not choices:
            raise Unrecordable("the response is not a chat completion")
        if error_in(document) is not None:
            raise Unrecordable("the response is an error")
        self.document: Json = document
        self.choices: Sequence[RecordedChoice] = [self._choice(each) for each in choices]

    @property
    def model(self) -> str:
        """The ``model`` field; empty when the server omits it."""
        return str(self.document.get("model") or "")

    @property
    def about(self) -> JsonObject:
        """The fields beside the choices: id, created, usage and those that the server adds."""
        about = {name: value for name, value in self.document.items() if name not in _RECORDED_ELSEWHERE and value}
        if isinstance(fields := about.get(_ELSEWHERE), dict):
            about[_ELSEWHERE] = {name: value for name, value in fields.items() if name not in _IDS}
        return about

    def usage(self) -> Usage:
        """The token counts of all choices together."""
        return usage_in(self.document.get("usage"))

    def body_for(self, call: ClientRequest) -> bytes:
        """The body of the response as the server itself would give it to the client."""
        if call.wants("return_token_ids") and call.wants("logprobs"):
            return self._body
        # The document that is read for recording has only a part of the logprobs.
        document = (parse_object(self._cut.rest) if call.wants("logprobs") else None) or self.document
        return self._cut.paste(dump_object(asked_for(document, call)))

    def plain(self) -> Json:
        """The response without token ids and logprobs."""
        return _without_logprobs(_without_ids(self.document))

    def _choice(self, choice: Any) -> RecordedChoice:
        if not isinstance(choice, dict) or not isinstance(message := choice.get("message"), dict):
            raise Unrecordable("a choice of the response has no message")
        try:
            said = to_message({**message, "role": "assistant"})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Unrecordable(f"the message of the response has an unknown format ({type(error).__name__})") from error
        places = [*places_of_ids(choice), *places_of_ids(self.document)]
        prompt = next((text for place in places if (text := self._inside(place.get(PROMPT_IDS))) is not None), None)
        sampled = next((ids for place in places if (ids := self._ids(place.get(SAMPLED_IDS))) is not None), None)
        extra = {name: value for name, value in message.items() if name not in _IN_MESSAGE and value}
        if isinstance(message.get("content"), list) and (thought := reasoning_in(message)):
            extra["reasoning_content"] = thought
        return RecordedChoice(
            message=said,
            finish_reason=finish_in(choice),
            prompt=prompt if sampled is not None else None,
            sampled=sampled or TokenIds(b"", []),
            logprobs=logprobs_in(choice, len(sampled.numbers) if sampled is not None else 0),
            extra=extra,
        )

    def _is_array(self, value: object) -> bool:
        return self._cut.inside(value) is not None

    def _inside(self, value: object) -> bytes | None:
        """The inside of an array of ids; ``None`` when ``value`` is not one."""
        return text_of(value)[:-1] if isinstance(value, list) else self._cut.inside(value)

    def _ids(self, value: object) -> TokenIds | None:
        if (inside := self._inside(value)) is None:
            return None
        text = canonical(inside)
        numbers = ids_of(text)
        return TokenIds(text, numbers) if numbers is not None else None


def _read(text: bytes) -> Json | None:
    try:
        found = dict(_ANSWER.validate_json(text))
    except ValidationError:
        return parse_object(text)
    return None if too_deep(found) else found


def _arrays(document: Json) -> Iterator[object]:
    """The values of all fields that may be arrays of ids."""
    choices = document.get("choices")
    answers = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    for holder in (document, *answers):
        for place in places_of_ids(holder):
            yield from (place.get(name) for name in _IDS)


def asked_for(document: Json, call: ClientRequest) -> Json:
    """A response, or a chunk of one, without the ids and logprobs that only the gateway asked for."""
    answer = document if call.wants("return_token_ids") else _without_ids(document)
    return answer if call.wants("logprobs") else _without_logprobs(answer)


def _without_ids(document: Json) -> Json:
    answer = strip_ids(document)
    if choices := document.get("choices"):
        answer["choices"] = [strip_ids(choice) for choice in choices]
    return answer


def strip_ids(holder: Json) -> Json:
    """A response, a choice, a message or a delta without token ids, in any of their places."""
    kept = {name: value for name, value in holder.items() if name not in _IDS}
    for name in (_ELSEWHERE, "message", "delta"):
        if isinstance(inner := kept.get(name), dict) and (_ELSEWHERE in inner or name == _ELSEWHERE):
            kept[name] = strip_ids(inner)
            if name == _ELSEWHERE and inner and not kept[name]:
                del kept[name]
    return kept


def without_fields(value: Any, names: frozenset[str]) -> Any:
    """JSON of any structure without the fields of these names, wherever they are."""
    if isinstance(value, dict):
        return {name: without_fields(each, names) for name, each in value.items() if name not in names}
    return [without_fields(each, names) for each in value] if isinstance(value, list) else value


def fields_not_asked_for(call: ClientRequest) -> frozenset[str]:
    """The fields with ids and logprobs that only the gateway asked for."""
    ids = () if call.wants("return_token_ids") else _IDS
    return frozenset(ids if call.wants("logprobs") else (*ids, "logprobs"))


def _without_logprobs(document: Json) -> Json:
    if not any(choice.get("logprobs") for choice in document.get("choices") or ()):
        return document
    return {**document, "choices": [{**choice, "logprobs": None} for choice in document["choices"]]}
