"""Request fields beyond the common protocol (token ids, logprobs, the neutral values of sampling parameters): which of
them each model of a server accepts.

A server may refuse one for all models, for some, or in the words of any error, and an error that names one may have
another cause: vLLM repeats the whole request in its errors. So a request that failed is sent again without the fields,
and a field counts as refused only when that succeeds. The refused fields are tried again after five minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

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
_MOST_MODELS = 256


class ExtensionTable:
    """What was learned about each model of one server."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        # Model -> the status of the error for each refused field, and when all of them are tried again.
        self._models: dict[str, tuple[dict[str, int], float]] = {}

    def attempt(self, model: str, wanted: Sequence[str]) -> ExtensionAttempt:
        """One request to ``model`` with the ``wanted`` fields, as far as it accepts them."""
        refused, until = self._models.get(model, ({}, 0.0))
        return ExtensionAttempt(self, model, wanted, refused if self._clock() < until else {})

    def learn(self, model: str, refused: dict[str, int]) -> None:
        """Note that a request succeeded without the ``refused`` fields only; without any, that it accepts all."""
        self._models.pop(model, None)
        if refused and len(self._models) < _MOST_MODELS:
            self._models[model] = refused, self._clock() + _PAUSE

    def refused(self) -> list[JsonObject]:
        """The fields that are not sent now: ``model``, ``field``, ``status`` of the error, ``retry_in`` seconds."""
        now = self._clock()
        return [
            {"model": model, "field": name, "status": status, "retry_in": max(0, round(until - now))}
            for model, (refused, until) in self._models.items()
            for name, status in refused.items()
        ]


class ExtensionAttempt:
    """The fields of one request, which is repeated as long as ``is_refused`` says so. ``failures``: its other ones."""

    def __init__(self, table: ExtensionTable, model: str, wanted: Sequence[str], known: dict[str, int]) -> None:
        self._table, self._model, self._known, self._refused = table, model, known, dict(known)
        self.failures = 0
        self.fields = tuple(name for name in wanted if name not in known)

    def why_missing(self, name: str) -> str:
        """Why an answer came without what the field asks for."""
        if (status := self._refused.get(name)) is None:
            return f"the model server ignores {name}"
        return f"the model server refuses {name} with status {status}"

    def is_refused(self, status: int, body: bytes) -> bool:
        """Whether to send the request again, with the ``fields`` that are left: those that the error does not name;
        none, where it names none."""
        text = body.decode("utf-8", "replace").lower()
        named = [name for name in self.fields if any(word in text for word in _WORDS.get(name, (name,)))]
        if not self.fields or not (status in _REFUSALS or (status in _REFUSALS_IF_NAMED and named)):
            return False
        self._refused |= dict.fromkeys(named or self.fields, status)
        self.fields = tuple(name for name in self.fields if name not in self._refused)
        return True

    def succeeded(self) -> None:
        """Learn from the answer that a request with ``fields``, and without the refused ones, got."""
        if self._refused != self._known or not self._known:
            self._table.learn(self._model, self._refused)


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
