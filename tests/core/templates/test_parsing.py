"""No input makes a parser of calls raise or hang; ``tests/golden`` has what is read from which text."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path

import pytest

from openhands_rl_plugin.core.templates import BARE, TAGGED, parse_calls

pytestmark = pytest.mark.contract


CORPUS = Path(__file__).parent / "corpus"
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
