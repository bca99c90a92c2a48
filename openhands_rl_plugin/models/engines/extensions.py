"""Request fields beyond the common protocol (token ids, logprobs, the neutral values of sampling parameters): which of
them each model of a server accepts.

A server may refuse one for all models, for some, or in the words of any error, and an error that names one may have
another cause: vLLM repeats the whole request in its errors. So a request that failed is sent again without the fields,
and a field counts as refused only when that succeeds. A refused field is tried again after minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import JsonObject, SamplingParams, Tokens

TOKEN_IDS, LOGPROBS = "return_token_ids", "logprobs"

SAMPLING = "sampling"
"""The neutral values of all sampling parameters that a request leaves open, together: a server that refuses one of them
(OpenAI's knows no top_k) has no defaults of a model for the others."""

Clock = Callable[[], float]
"""Seconds; only differences count."""

# What an error may call each field.
_WORDS: Mapping[str, tuple[str, ...]] = {
    TOKEN_IDS: ("token_id",),
    LOGPROBS: ("logprob",),
    SAMPLING: tuple(NEUTRAL_PARAMETERS),
}
# Statuses of errors that the request itself may have caused.
_REFUSALS = frozenset({400, 403, 405, 415, 422})
# Those that mostly have another cause: a missing model, a failure of the server.
_REFUSALS_IF_NAMED = frozenset({404, 500, 501})
_PAUSE = 300.0
_PROBE_SECONDS = 60.0
_MOST_MODELS = 256


class _Refusal(NamedTuple):
    """``until``: when the field is tried again. ``status``: of the error."""

    until: float
    status: int


class ExtensionTable:
    """What was learned about each model of one server."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, dict[str, _Refusal]] = {}

    def attempt(self, model: str, wanted: Sequence[str]) -> ExtensionAttempt:
        """One request to ``model`` with the ``wanted`` fields, as far as it accepts them."""
        if len(self._models) > _MOST_MODELS:
            self._models.clear()
        refusals, now = self._models.setdefault(model, {}), self._clock()
        sent = [name for name in wanted if name not in refusals]
        # One at a time, so that a refusal tells which; other requests do without it in the meantime.
        due = next((name for name in wanted if name in refusals and refusals[name].until <= now), None)
        if due is not None:
            refusals[due] = refusals[due]._replace(until=now + _PROBE_SECONDS)
            sent.append(due)
        return ExtensionAttempt(refusals, self._clock, sent, due)

    def refused(self) -> list[JsonObject]:
        """The fields that are not sent now: ``model``, ``field``, ``status`` of the error, ``retry_in`` seconds."""
        now = self._clock()
        return [
            {"model": model, "field": name, "status": each.status, "retry_in": max(0, round(each.until - now))}
            for model, refusals in self._models.items()
            for name, each in refusals.items()
        ]


class ExtensionAttempt:
    """The fields of one request, which is repeated as long as ``is_refused`` says so. ``failures``: its other ones."""

    def __init__(self, refusals: dict[str, _Refusal], clock: Clock, fields: Sequence[str], probed: str | None) -> None:
        self._refusals, self._clock, self._probed = refusals, clock, probed
        self._dropped: tuple[str, ...] = ()
        self._clear = True
        self._status = 0
        self.failures = 0
        self.fields = tuple(fields)

    def why_missing(self, name: str) -> str:
        """Why an answer came without what the field asks for."""
        refusal = self._refusals.get(name)
        if name in self.fields or refusal is None:  # a user's own value is not in the fields
            return f"the model server ignores {name}"
        return f"the model server refuses {name} with status {refusal.status}"

    def is_refused(self, status: int, body: bytes) -> bool:
        """Whether to send the request again, with the ``fields`` that are left."""
        text = body.decode("utf-8", "replace").lower()
        named = [name for name in self.fields if any(word in text for word in _WORDS.get(name, (name,)))]
        if not self.fields or not (status in _REFUSALS or (status in _REFUSALS_IF_NAMED and named)):
            return False
        self._status = status
        probed = [self._probed] if self._probed in self.fields and not self._dropped else []
        cause = named if len(named) == 1 else probed
        # After an unclear refusal, those that were dropped may not have been the cause, or not all of it.
        self._clear &= bool(cause)
        self._dropped += tuple(drop := cause if self._clear else self.fields)
        self.fields = tuple(name for name in self.fields if name not in drop)
        return True

    def succeeded(self) -> None:
        """Learn from the answer that a request with ``fields``, and without the refused ones, got."""
        for name in self.fields:
            self._refusals.pop(name, None)
        # Of several one may be the cause, so each is tried alone at the next requests.
        unclear = not self._clear and len(self._dropped) > 1
        for name in self._dropped:
            self._refusals[name] = _Refusal(self._clock() + (0.0 if unclear else _PAUSE), self._status)


def extension_values(fields: Sequence[str], body: Mapping[str, object]) -> JsonObject:
    """What to add to a request for these fields. ``body``: its sampling parameters, which are not changed."""
    values: JsonObject = dict.fromkeys((name for name in fields if name != SAMPLING), True)
    open_ones = (name for name in NEUTRAL_PARAMETERS if SAMPLING in fields and body.get(name) is None)
    return values | {name: NEUTRAL_PARAMETERS[name] for name in open_ones}


def sampling_as_sent(sampling: SamplingParams, asking: ExtensionAttempt) -> SamplingParams:
    """The parameters that the answered request had: ``None`` for neutral values that the server refused."""
    sent = NEUTRAL_PARAMETERS if SAMPLING in asking.fields else dict.fromkeys(NEUTRAL_PARAMETERS)
    own = {name: value for name in sent if (value := getattr(sampling, name)) not in (None, NEUTRAL_PARAMETERS[name])}
    return sampling.model_copy(update={**sent, **own})


def missing_parts(why: Callable[[str], str], tokens: Tokens | None) -> JsonObject:
    """What training needs and an answer lacks, each with its cause, ``why`` for a field: as under ``MISSING``."""
    if tokens is None:
        return {"token_ids": why(TOKEN_IDS)}
    if tokens.sampled_ids and not tokens.logprobs:
        return {"logprobs": why(LOGPROBS)}
    return {}
