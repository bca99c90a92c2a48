"""Native calls -> OpenHands' text -> native calls changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.templates import RenderError, calls_in_text, render_call, without_calls
from openhands_rl_plugin.core.types import JsonObject, ToolCall

TYPES = ["string", "integer", "number", "boolean", "array", "object", "null"]

snippets = st.sampled_from(
    [
        *("</parameter>", "<parameter=x>", "<function=f>", "</function>", "<json>", "</json>", "<json>1", "<think>"),
        *['"a"', "1", "1.0", "true", "None", "null", "[]", "{}", "NaN", "☃", "\\"],
        *("</Parameter >", "\n", "\n\n", " ", "\r\n"),
    ]
)
texts = st.lists(snippets | st.text(max_size=8), max_size=6).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
schemas: st.SearchStrategy[JsonObject] = st.one_of(
    st.sampled_from(TYPES).map(lambda one: {"type": one}),
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=3).map(lambda several: {"type": several}),
    st.sampled_from(TYPES).map(lambda one: {"anyOf": [{"type": one}, {"type": "null"}]}),
    st.lists(texts | st.integers(), min_size=1, max_size=3).map(lambda allowed: {"enum": allowed}),
    st.just({}),
)


def tool(properties: JsonObject) -> JsonObject:
    schema: JsonObject = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def exact(arguments: str) -> str:
    """Equal texts for equal arguments only: 1, 1.0 and true differ, and the order counts."""
    return json.dumps(json.loads(arguments))


@settings(max_examples=50)
@given(st.dictionaries(texts, st.tuples(values, schemas), max_size=4))
def test_any_call_comes_back_as_it_was(given_: dict[str, tuple[object, JsonObject]]) -> None:
    arguments = json.dumps({name: value for name, (value, _) in given_.items()})
    call = ToolCall(name="f", arguments=arguments)
    for tools in ((), (tool({name: schema for name, (_, schema) in given_.items()}),)):
        text = render_call(call, tools[0] if tools else None)
        (read,) = calls_in_text(text, tools)
        assert read.name == "f" and exact(read.arguments) == exact(arguments)
        text.encode()


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


plain_texts = st.text().filter(
    lambda text: not any(mark in text for mark in ("</", "<parameter", "<function", "<json>"))
)


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
    ],
)
def test_what_cannot_be_written_is_refused(name: str, arguments: str, reason: str) -> None:
    with pytest.raises(RenderError, match=reason):
        render_call(ToolCall(name=name, arguments=arguments))
