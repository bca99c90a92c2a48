"""Hermes-style tool calls in the model's text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_an_unclosed_last_call_counts() -> None:
    assert parse_tool_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}', TOOLS).calls == (
        call_of("f", '{"x": 1}'),
    )


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        "<tool_call>{broken}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
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


def test_a_string_may_hold_the_closing_tag() -> None:
    text = '<TOOL_CALL>{"name": "f", "arguments": {"x": "a\\n</tool_call>"}}</TOOL_CALL>'
    assert parse_tool_calls(text, TOOLS).calls == (call_of("f", json.dumps({"x": "a\n</tool_call>"})),)


def test_text_after_a_call_is_content() -> None:
    parsed = parse_tool_calls(f"first {render_tool_call(call_of('f', '{}'))} then\n", TOOLS)
    assert parsed.content == "first  then" and parsed.text == "first  then\n"


def test_arguments_that_mention_arguments() -> None:
    raw = '{"arguments": {"arguments": 1}}'
    (call,) = parse_tool_calls(render_tool_call(call_of("f", raw)), TOOLS).calls
    assert call == call_of("f", raw)


@given(st.text(min_size=1), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_rendered_calls_are_read_back(name: str, arguments: dict[str, object]) -> None:
    raw = json.dumps(arguments)
    assert parse_tool_calls(render_tool_call(call_of(name, raw)), TOOLS).calls == (call_of(name, raw),)
