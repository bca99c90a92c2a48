"""Calls read from texts of models, well and badly formed, by every family's template.

The texts, ``texts.json.zst``, stand alone or with tools that their calls must keep to.
"""

from __future__ import annotations

import json
from typing import Any

from golden import read

from openhands_rl_plugin import make_template

FAMILIES = ("hermes", "llama3", "llama3.1", "qwen2.5", "qwen3", "qwen3-no-thinking", "qwen3-instruct", "smollm2")


def parse_all() -> dict[str, dict[str, str]]:
    """Row -> reading -> who reads it so."""
    given = read("texts")
    parsers = {name: make_template(name).parse for name in FAMILIES}
    made = {}
    for at, (text, has_tools) in enumerate(given["rows"]):
        readings = {name: reading(parse(text, given["tools"] if has_tools else ())) for name, parse in parsers.items()}
        made[str(at)] = {"text": text, **readings}
    return made


def reading(answer: Any) -> str:
    """In one line, its problems first."""
    problems = ",".join("problem" for _ in answer.problems)
    calls = [[call.name, call.arguments] for call in answer.calls]
    return f"problems({problems}) notes() {json.dumps([calls, answer.before, answer.after, answer.thought])}"
