"""Native calls -> OpenHands' text -> native calls changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.templates import RenderError, calls_in_text, render_call, without_calls
from openhands_rl_plugin.core.types import JsonObject, ToolCall

PIECES = ("<json>", "<think>", '"a"', "1", "1.0", "true", "None", "null", "[]", "{}", "NaN", "☃", "\\", " ")
snippets = st.sampled_from([*PIECES, "\n", "\n\n", "\r\n"])
texts = st.lists(snippets | st.text(max_size=8), max_size=6).map("".join).filter(lambda text: "</" not in text)
values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner | texts, max_size=3) | st.dictionaries(texts, inner | texts, max_size=3),
    max_leaves=6,
)


def tool(properties: JsonObject) -> JsonObject:
    schema: JsonObject = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def exact(arguments: str) -> str:
    """Equal texts for equal arguments only: 1, 1.0 and true differ, and the order counts."""
    return json.dumps(json.loads(arguments))


@settings(max_examples=50)
@given(texts, values)
def test_any_call_comes_back_as_it_was(text: str, value: object) -> None:
    arguments = json.dumps({"text": text, "value": value})
    written = render_call(ToolCall(name="f", arguments=arguments))
    types = ["integer", "number", "boolean", "array", "object", "null"]
    (read,) = calls_in_text(written, (tool({"text": {"type": "string"}, "value": {"type": types}}),))
    assert read.name == "f" and exact(read.arguments) == exact(arguments)


@given(st.lists(st.dictionaries(st.text("ab", min_size=1), texts, max_size=3), min_size=1, max_size=4), st.text())
def test_several_calls_and_the_text_around_them(arguments: list[dict[str, str]], between: str) -> None:
    if "<" in between:
        return
    calls = tuple(ToolCall(name="f", arguments=json.dumps(one, ensure_ascii=False)) for one in arguments)
    text = between.join(["", *(render_call(call) for call in calls), ""])
    assert calls_in_text(text) == calls
    assert without_calls(text) == (between * (len(calls) + 1)).strip()
    assert calls_in_text(text.rstrip().removesuffix("</function>") if not between.strip() else text) == calls


def write_as_sdk(wire: JsonObject) -> str:
    # Seconds to import, which no test but those that call it needs.
    from openhands.sdk.llm.mixins.fn_call_converter import convert_tool_call_to_string

    return convert_tool_call_to_string(wire)


plain_texts = st.text().filter(lambda text: not any(mark in text for mark in ("</", "<parameter", "<function")))


@settings(max_examples=50)
@given(plain_texts, plain_texts)
def test_what_the_references_write_is_read_as_it_was(one: str, other: str) -> None:
    arguments = json.dumps({"a": one, "n": 5, "b": other, "l": [1, None]})
    wire = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    tools = (
        tool({"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "string"}, "l": {"type": "array"}}),
    )
    (by_sdk,) = calls_in_text(write_as_sdk(wire), tools)
    assert exact(by_sdk.arguments) == exact(arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("f", "{broken", "not JSON"),
        ("f", "[1]", "no JSON object"),
        ("f", "[" * 100_000, "not JSON"),
        ("f", '{"x": [-Infinity, NaN]}', "are not JSON"),
        ("f>", "{}", "cannot stand"),
        *(("f", json.dumps({"x": text}), "'x' of 'f' cannot stand") for text in ("a</parameter>", "\ud800")),
        ("f", '{"x>": 1}', "'x>' of 'f' cannot stand"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, arguments: str, reason: str) -> None:
    with pytest.raises(RenderError, match=reason):
        render_call(ToolCall(name=name, arguments=arguments))
