"""Every malformed or odd call of the corpus is read as its author wrote down, or is a problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.core.templates.parsing import BARE, TAGGED, parse_calls

pytestmark = pytest.mark.contract

CORPUS = Path(__file__).parent / "corpus"
FORMS = {"tool_call": TAGGED, "bare_json": BARE}


def rows(form: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CORPUS / f"{form}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_calls_and_problems_are_found(form: str) -> None:
    for row in rows(form):
        answer = parse_calls(row["text"], (), FORMS[form])
        calls = [[call.name, json.loads(call.arguments)] for call in answer.calls]
        assert {"text": row["text"], "calls": calls, "problems": len(answer.problems)} == row
        assert row["text"].startswith(answer.before)
        assert answer.calls or answer.problems or answer.before == row["text"]


def test_the_corpus_is_large() -> None:
    assert sum(len(rows(form)) for form in FORMS) >= 190
