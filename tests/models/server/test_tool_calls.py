"""Hermes-style tool calls in the model's text."""

import pytest

from openhands_rl_plugin.core.templates.chat import template_for
from openhands_rl_plugin.core.templates.parsing import render_tool_call
from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.models.server.wire import ParsedText, parse_tool_calls

TOOLS = [{"type": "function", "function": {"name": "execute_bash", "parameters": {"type": "object"}}}]


def call_of(name: str, arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def test_calls_and_the_text_before_them() -> None:
    text = (
        'Let me look.\n<tool_call>\n{"name": "search", "arguments": {"q":  "a b"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "think"}</tool_call>'
    )
    parsed = parse_tool_calls(text, TOOLS)
    assert parsed.content == "Let me look."
    assert parsed.calls == (call_of("search", '{"q":  "a b"}'), call_of("think", "{}"))


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>oops</tool_call>',
        "<tool_call>",
        '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>',
    ],
)
def test_what_is_malformed_stays_text(text: str) -> None:
    parsed = parse_tool_calls(text, TOOLS)
    assert parsed.content == text and not parsed.calls


@pytest.mark.parametrize("opening", ["```json\n", "```\n", "\n```JSON "])
def test_an_answer_that_is_one_fenced_object_naming_an_offered_tool_is_a_call(opening: str) -> None:
    """As Qwen2.5-Coder-1.5B-Instruct calls tools."""
    text = opening + '{\n  "name": "execute_bash",\n  "arguments": {\n    "command": "ls"\n  }\n}\n```\n'
    parsed = parse_tool_calls(text, TOOLS)
    assert (parsed.content, parsed.calls) == (None, (call_of("execute_bash", '{\n    "command": "ls"\n  }'),))
    assert template_for("qwen2.5").parse(text, TOOLS).calls == parsed.calls
    for other in (
        text + "Done.",
        "So: " + text,
        text.replace("execute", "exec"),
        text[:-5],
        text.replace("{", "[{", 1),
    ):
        assert parse_tool_calls(other, TOOLS) == ParsedText(other, (), other)
    assert parse_tool_calls(text, ()) == ParsedText(text, (), text)


def test_text_after_a_call_is_content() -> None:
    parsed = parse_tool_calls(f"first {render_tool_call(call_of('f', '{}'))} then\n", TOOLS)
    assert parsed.content == "first  then" and parsed.text == "first  then\n"
