"""Request fields beyond the common protocol (token ids, logprobs, the neutral values of sampling parameters): which of
them each model of a server accepts.

A server may refuse one for all models, for some, or in the words of any error, and an error that names one may have
another cause: vLLM repeats the whole request in its errors. So a request that failed is sent again without the fields,
and a field counts as refused only when that succeeds. A refused field is tried again after minutes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.concurrency import Backoff
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
_PAUSE = Backoff(first=300.0, longest=3600.0)
_PROBE_SECONDS = 60.0
_MOST_MODELS = 256


@dataclass(slots=True)
class _FieldState:
    """``until``: when a refused field is tried again; ``None`` when it was not refused. ``status``: of the error."""

    until: float | None = None
    failures: int = 0
    status: int = 0


class ExtensionTable:
    """What was learned about each model of one server."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, defaultdict[str, _FieldState]] = {}

    def attempt(self, model: str, wanted: Sequence[str]) -> ExtensionAttempt:
        """One request to ``model`` with the ``wanted`` fields, as far as it accepts them."""
        if len(self._models) > _MOST_MODELS:
            self._models.clear()
        state = self._models.setdefault(model, defaultdict(_FieldState))
        now = self._clock()
        sent = [name for name in wanted if state[name].until is None]
        due = [name for name in wanted if (until := state[name].until) is not None and until <= now]
        for name in due[:1]:
            # One at a time, so that a refusal tells which; other requests do without it in the meantime.
            state[name].until = now + _PROBE_SECONDS
        return ExtensionAttempt(state, self._clock, sent, due[:1])

    def refused(self) -> list[JsonObject]:
        """The fields that are not sent now: ``model``, ``field``, ``status`` of the error, ``retry_in`` seconds."""
        now = self._clock()
        return [
            {"model": model, "field": name, "status": each.status, "retry_in": max(0, round(each.until - now))}
            for model, state in self._models.items()
            for name, each in state.items()
            if each.until is not None
        ]


class ExtensionAttempt:
    """The fields of one request, which is repeated as long as ``is_refused`` says so. ``failures``: its other ones."""

    def __init__(
        self, state: dict[str, _FieldState], clock: Clock, trusted: Sequence[str], probed: Sequence[str]
    ) -> None:
        self._state = state
        self._clock = clock
        self._probed = frozenset(probed)
        self._dropped: tuple[str, ...] = ()
        self._clear = True
        self._status = 0
        self.failures = 0
        self.fields: tuple[str, ...] = (*trusted, *probed)

    def why_missing(self, name: str) -> str:
        """Why an answer came without what the field asks for."""
        state = self._state[name]
        if name in self.fields or state.until is None:  # a user's own value is not in the fields
            return f"the model server ignores {name}"
        status = state.status
        return f"the model server refuses {name}" + (f" with status {status}" if status else "")

    def is_refused(self, status: int, body: bytes) -> bool:
        """Whether to send the request again, with the ``fields`` that are left."""
        text = body.decode("utf-8", "replace").lower()
        named = [name for name in self.fields if any(word in text for word in _WORDS.get(name, (name,)))]
        if not self.fields or not (status in _REFUSALS or (status in _REFUSALS_IF_NAMED and named)):
            return False
        probed = [name for name in self.fields if name in self._probed and not self._dropped]
        cause = named if len(named) == 1 else probed
        # After an unclear refusal, those that were dropped may not have been the cause, or not all of it.
        self._clear &= bool(cause)
        drop = cause if self._clear else self.fields
        self._dropped += tuple(drop)
        self._status = status
        self.fields = tuple(name for name in self.fields if name not in drop)
        return True

    def succeeded(self) -> None:
        """Learn from the answer that a request with ``fields``, and without the refused ones, got."""
        for name in self.fields:
            self._state[name] = _FieldState()
        now = self._clock()
        for name in self._dropped:
            state = self._state[name]
            state.status = self._status
            if not self._clear and len(self._dropped) > 1:
                state.until = now  # it may be one of them only, so each is tried alone at the next requests
            elif state.until is None or name in self._probed or state.until <= now:
                # Only once for requests that were refused side by side.
                state.failures += 1
                state.until = now + _PAUSE.pause(state.failures)


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
