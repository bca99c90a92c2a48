"""Which fields a model refuses, from the errors of real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from openhands_rl_plugin.core.types import SamplingParams
from openhands_rl_plugin.models.engines.client import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    ExtensionTable,
    sampling_as_sent,
)

BOTH = (TOKEN_IDS, LOGPROBS)
Server = Callable[[set[str]], tuple[int, str]]
"""The fields of a request -> status and body."""


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusing(*names: str, status: int = 400, body: str = "{name}") -> Server:
    def answer(fields: set[str]) -> tuple[int, str]:
        hit = next((name for name in names if name in fields), None)
        return (200, "") if hit is None else (status, body.replace("{name}", hit).replace("{all}", str(fields)))

    return answer


def ask(
    table: ExtensionTable, server: Server, model: str = "m", wanted: Iterable[str] = BOTH
) -> tuple[Any, list[set[str]]]:
    """The attempt, and what each of its requests had."""
    attempt, sent = table.attempt(model, tuple(wanted)), []
    while True:
        sent.append(set(attempt.fields))
        status, body = server(sent[-1])
        if status == 200:
            attempt.succeeded()
            return attempt, sent
        if not attempt.is_refused(status, body.encode()):
            return None, sent


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, '{"error": {"message": "Unrecognized request argument supplied: {name}"}}'),
        (403, '{"error": {"message": "You are not allowed to request {name} from this model"}}'),
        (422, '{"detail": [{"type": "extra_forbidden", "loc": ["body", "{name}"], "input": true}]}'),
        (404, '{"error": {"message": "No endpoints found that support {name}"}}'),
        (500, "{name} is not supported for models created with logits_all=False"),
    ],
)
@pytest.mark.parametrize("refused", [LOGPROBS, TOKEN_IDS])
def test_only_the_refused_field_is_dropped(status: int, body: str, refused: str):
    table, server = ExtensionTable(Clock()), refusing(refused, status=status, body=body)
    for _ in range(4):
        ask(table, server)
    attempt, sent = ask(table, server)
    assert sent == [{*BOTH} - {refused}]
    assert [each["field"] for each in table.refused()] == [refused]
    assert attempt.why_missing(refused) == f"the model server refuses {refused} with status {status}"


@pytest.mark.parametrize("body", ["Logprobs is not enabled, or return_token_ids", "unsupported option", "{all}"])
def test_all_are_dropped_where_the_error_does_not_tell_which(body: str):
    table, server = ExtensionTable(clock := Clock()), refusing(LOGPROBS, body=body)
    assert [ask(table, server)[1] for _ in range(2)] == [[{*BOTH}, set()], [set()]]
    clock.now += 400
    assert ask(table, lambda fields: (200, ""))[1] == [{*BOTH}] and table.refused() == []


def test_a_failure_after_a_refusal_proves_nothing():
    table = ExtensionTable(Clock())
    attempt, _ = ask(table, lambda fields: (400, "logprobs") if LOGPROBS in fields else (429, "slow down"))
    assert attempt is None and table.refused() == []


def test_a_hosted_api_that_names_one_unknown_parameter_at_a_time_is_asked_twice():
    """OpenAI's knows no ``return_token_ids`` and no ``top_k``, and gives logprobs."""
    words = {TOKEN_IDS: "return_token_ids", SAMPLING: "top_k"}

    def answer(fields: set[str]) -> tuple[int, str]:
        hit = next((words[name] for name in words if name in fields), None)
        return (200, "") if hit is None else (400, f"Unrecognized request argument supplied: {hit}")

    table = ExtensionTable(Clock())
    attempt, sent = ask(table, answer, wanted=(TOKEN_IDS, LOGPROBS, SAMPLING))
    assert sent == [{TOKEN_IDS, LOGPROBS, SAMPLING}, {LOGPROBS, SAMPLING}, {LOGPROBS}]
    assert {each["field"] for each in table.refused()} == {TOKEN_IDS, SAMPLING}
    asked = SamplingParams(temperature=0.5, top_k=7, min_p=0.0)
    assert sampling_as_sent(asked, attempt) == SamplingParams(temperature=0.5, top_k=7)
    assert ask(table, answer, wanted=(TOKEN_IDS, LOGPROBS, SAMPLING))[1] == [{LOGPROBS}]
