"""Calls are read from texts as their authors wrote down, and no input makes a parser raise or hang."""

from __future__ import annotations

import gc
import json
import time
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


TOOLS = json.loads((CORPUS / "tools.json").read_text(encoding="utf-8"))
HOSTILE = [
    '<tool_call>{"a',
    '<tool_call>{"name": "f", "arguments": {}}',
    '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>',
    "<tool_call>{'a': 'b</tool_call>",
    '<tool_call>["\\"<tool_call>\\"',
    "<function=f><parameter=a>",
    *("<function=f><parameter=a></function>", "<function=f><parameter=a></think>"),
    "<function=f><parameter=a>x</parameter>",
    "<function=f>{'a': '",
    "</parameter>",
    "</parameter>\n</function><function=f>",
    '{"name": ',
    '{"name": "f"} ',
    '{"name": "f", "parameters": {}} ',
    '{"name": "f", "parameters": {',
    '<|python_tag|>{"a": ',
    *("<think>", "</think>", " ", "<", "<parameter=a>", "<function=", "<function=f>", "<tool_call>", "<tool_call>["),
    '{"name": "f", "parameters": {"x": "\\"',
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_is_linear(piece: str) -> None:
    """Ten times as long takes ten times as long, with room for a busy machine; quadratic growth would be a hundred."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece)) + '"parameters": }'
        started = time.process_time()
        for form in (TAGGED, BARE):
            parse_calls(text, TOOLS, form)
        return time.process_time() - started

    # A collection of everything that other tests have loaded takes longer than the parsing. Longer texts would measure
    # json's errors, which count the lines before them.
    gc.disable()
    try:
        assert min(seconds(50_000), seconds(50_000)) < 40 * max(seconds(5_000), 0.008)
    finally:
        gc.enable()
