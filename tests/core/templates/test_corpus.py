"""Every malformed or odd call of the corpus is read as its author wrote down, or reported as the right problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.core.templates.json_calls import parse_bare_json, parse_tool_call_json
from openhands_rl_plugin.core.templates.parsing import ParsedAnswer

pytestmark = pytest.mark.contract

CORPUS = Path(__file__).parent / "corpus"
PARSERS: dict[str, Callable[..., ParsedAnswer]] = {
    "tool_call": parse_tool_call_json,
    "bare_json": parse_bare_json,
}
TOOLS = json.loads((CORPUS / "tools.json").read_text(encoding="utf-8"))


def rows(dialect: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CORPUS / f"{dialect}.jsonl").read_text(encoding="utf-8").splitlines()]


def summary(answer: ParsedAnswer) -> dict[str, Any]:
    return {
        "calls": [[call.name, json.loads(call.arguments)] for call in answer.calls],
        "problems": [problem.kind.value for problem in answer.problems],
        "notes": [note.kind.value for note in answer.notes],
    }


@pytest.mark.parametrize("dialect", sorted(PARSERS))
def test_recall_is_one(dialect: str) -> None:
    wrong = []
    for row in rows(dialect):
        got = summary(PARSERS[dialect](row["text"], TOOLS if row.get("tools") else ()))
        if got != {key: row[key] for key in ("calls", "problems", "notes")}:
            wrong.append(f"{row}\n    got {got}")
    assert not wrong, "\n".join(wrong)


def test_the_corpus_is_large_and_has_every_kind() -> None:
    everything = [row for dialect in PARSERS for row in rows(dialect)]
    texts = {(row["text"], row.get("tools", False)) for row in everything}
    assert len(texts) >= 200
    kinds = {kind for row in everything for kind in (*row["problems"], *row["notes"])}
    assert len(kinds) == 12


@pytest.mark.parametrize("dialect", sorted(PARSERS))
def test_nothing_is_lost_between_the_parts(dialect: str) -> None:
    """Text outside of calls and problems is in ``before`` and ``after``, and every span lies where it says."""
    for row in rows(dialect):
        answer = PARSERS[dialect](row["text"])
        spans = sorted({*answer.spans, *(problem.span for problem in answer.problems if problem.kind != "in_thought")})
        outside = row["text"]
        for span in reversed(spans):
            assert 0 <= span.start < span.end <= len(row["text"])
            outside = outside[: span.start] + outside[span.end :]
        assert answer.before + answer.after == outside
        assert all(problem.message.strip() for problem in answer.problems) and bool(answer.feedback) == bool(
            answer.problems
        )
