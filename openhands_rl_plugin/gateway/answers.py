"""Answers of the model server: what is recorded of them, and what the client gets to see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from openhands_rl_plugin.gateway.calls import ChatCall, Unrecordable
from openhands_rl_plugin.gateway.idtext import are_ids, canonical, cut, paste
from openhands_rl_plugin.gateway.jsontext import Json, read_object, write
from openhands_rl_plugin.messages import to_message
from openhands_rl_plugin.types import JsonObject, Message, Usage

_IDS, _SAMPLED = "prompt_token_ids", "token_ids"
_ELSEWHERE = "provider_specific_fields"  # where litellm puts what OpenAI's format has no place for
_TOLD_ELSEWHERE = frozenset({"choices", "object", "model", _IDS})
_IN_MESSAGE = ("role", "content", "tool_calls", _ELSEWHERE)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer. ``prompt`` is the canonical text of the prompt's ids; ``None``: the server gave no ids.

    ``extra`` is what the server said beside the message, such as ``reasoning_content``.
    """

    message: Message
    finish_reason: str | None
    prompt: bytes | None
    sampled: list[int]
    logprobs: list[float]
    extra: JsonObject


class ChatAnswer:
    """A chat completion as the model server sent it."""

    def __init__(self, body: bytes) -> None:
        """Raises ``Unrecordable`` when ``body`` is no chat completion."""
        self._body = body
        rest, self._texts = cut(body)
        document = read_object(rest)
        if document is None and self._texts:
            # An array that holds no ids but texts may have been cut in the middle.
            document, self._texts = read_object(body), []
        choices = document.get("choices") if document is not None else None
        if document is None or not isinstance(choices, list) or not choices:
            raise Unrecordable("the answer is no chat completion")
        self.document: Json = document
        self.choices: Sequence[Choice] = [self._choice(each) for each in choices]

    @property
    def model(self) -> str:
        """The name of what answered; empty when the server does not say."""
        return str(self.document.get("model") or "")

    @property
    def about(self) -> JsonObject:
        """What the answer says beside its choices: id, time, usage and whatever else the server adds."""
        return {name: value for name, value in self.document.items() if name not in _TOLD_ELSEWHERE and value}

    def usage(self) -> Usage:
        """The token counts of all choices together."""
        usage = self.document.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Usage(
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(cached),
            calls=1,
        )

    def seen_by(self, call: ChatCall) -> Json:
        """The answer as if the client had talked to the server itself, with numbers in place of prompt ids."""
        ids, logprobs = call.wants("return_token_ids"), call.wants("logprobs")
        answer = self.document if ids else _without_ids(self.document)
        if logprobs:
            return answer
        return {**answer, "choices": [{**choice, "logprobs": None} for choice in answer["choices"]]}

    def body_for(self, call: ChatCall) -> bytes:
        """``seen_by`` as the body of a response."""
        if call.wants("return_token_ids") and call.wants("logprobs"):
            return self._body
        return self.with_ids(write(self.seen_by(call)))

    def with_ids(self, written: bytes) -> bytes:
        """Put the prompt ids back into a part of ``seen_by``."""
        return paste(written, self._texts) if self._texts else written

    def _choice(self, choice: Any) -> Choice:
        if not isinstance(choice, dict) or not isinstance(message := choice.get("message"), dict):
            raise Unrecordable("a choice of the answer has no message")
        try:
            said = to_message({**message, "role": "assistant"})
        except (ValidationError, LookupError, TypeError, AttributeError) as error:
            raise Unrecordable(f"the answer's message has an unknown form ({type(error).__name__})") from error
        places = [*_places(choice), *_places(self.document)]
        prompt = next((text for place in places if (text := self._prompt(place)) is not None), None)
        sampled = next((ids for place in places if are_ids(ids := place.get(_SAMPLED))), None)
        reason = choice.get("finish_reason")
        return Choice(
            message=said,
            finish_reason=reason if isinstance(reason, str) else None,
            prompt=prompt if sampled is not None else None,
            sampled=sampled or [],
            logprobs=_logprobs(choice, len(sampled or ())),
            extra={name: value for name, value in message.items() if name not in _IN_MESSAGE and value},
        )

    def _prompt(self, place: Json) -> bytes | None:
        number = place.get(_IDS)
        return canonical(self._texts[number]) if type(number) is int and number < len(self._texts) else None


def _places(holder: Json) -> Iterator[Json]:
    """Where token ids may stand."""
    message = holder.get("message")
    for place in (holder, holder.get(_ELSEWHERE), message.get(_ELSEWHERE) if isinstance(message, dict) else None):
        if isinstance(place, dict):
            yield place


def _without_ids(document: Json) -> Json:
    answer = {name: value for name, value in document.items() if name != _IDS}
    answer["choices"] = [
        {name: value for name, value in choice.items() if name not in (_SAMPLED, _IDS)}
        for choice in document["choices"]
    ]
    return answer


def _logprobs(choice: Json, expected: int) -> list[float]:
    """One logprob for each sampled id, or nothing."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or len(content) != expected:
        return []
    try:
        values = [float(token["logprob"]) for token in content]
    except (TypeError, LookupError, ValueError):
        return []
    # One that is not finite makes the sum so.
    return values if math.isfinite(sum(values)) else []


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0
