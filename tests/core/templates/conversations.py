"""Conversations to render: fixed ones for the golden files, and a strategy for any others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from hypothesis import strategies as st

from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall

WITHOUT_CALLS = {"llama3", "smollm2"}
ONE_CALL = {"llama3.1"}


class Conversation(NamedTuple):
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]


def _tool(name: str, description: str, properties: JsonObject, required: Sequence[str] = ()) -> JsonObject:
    schema: JsonObject = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool(
        "search",
        "Search the <shop> & 'compare'.\nÜber 3 ≥ 2 ☃",
        {"query": {"type": "string", "description": " what to look for "}, "limit": {"type": "integer"}},
        ["query"],
    ),
    _tool(
        "edit",
        "Edit a file",
        {
            "lines": {"type": "array", "items": {"type": "integer"}, "description": "from, to"},
            "options": {"type": "object", "additionalProperties": {"type": "number"}},
            "either": {"type": ["string", "integer"]},
            "plain": {"type": "object", "description": "anything"},
            "open": {"type": "object", "additionalProperties": False},
            "union": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
        },
    ),
    _tool("finish", "Finish", {}),
)


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _said(content: str | None, *calls: tuple[str, str]) -> Message:
    made = tuple(ToolCall(id=f"call_{at}", name=name, arguments=text) for at, (name, text) in enumerate(calls))
    return Message(role="assistant", content=content, tool_calls=made)


def _told(content: str | None, name: str = "search") -> Message:
    return Message(role="tool", content=content, tool_call_id="call_0", name=name)


SYSTEM = Message(role="system", content="  You help.\n")
FIXED: dict[str, tuple[Message, ...]] = {
    "one question": (_user("Hello ☃ <b>&'\""),),
    "system and question": (SYSTEM, _user("Hi\n")),
    "two turns": (SYSTEM, _user("Hi"), _said("Hello"), _user(" again ")),
    "a call and its result": (
        SYSTEM,
        _user("Find a lamp"),
        _said("Let me look.", ("search", '{"query": "rote Lämpchen ☃", "limit": 3}')),
        _told("found <3> & 'more'"),
    ),
    "a call without content": (_user("Find"), _said(None, ("search", '{"query":  "a b"}')), _told("ok"), _said("Done")),
    "several calls and results": (
        _user("Find both"),
        _said("Both", ("search", '{"query": "a"}'), ("edit", '{"lines": [1, 2], "exact": true}')),
        _told("one"),
        _told("two\n", "edit"),
        _said(None, ("finish", "{}")),
        _told(None, "finish"),
        _user("and now?"),
    ),
    "thoughts": (
        _user("2+2"),
        _said("<think>\neasy\n</think>\n\n4"),
        _user("and 3+3"),
        _said("<think>\nlet me\n</think>\n\nusing it", ("search", '{"query": "3+3"}')),
        _told("6"),
        _said("<think>\n\n</think>\n\n6"),
    ),
    "results shown as a question": (_user("go"), _said("a</think>b"), _user("<tool_response>\nx\n</tool_response>")),
    "a second system message": (SYSTEM, _user("a"), Message(role="system", content="Be brief."), _user("b")),
    "arguments that are no JSON": (_user("a"), _said("x", ("search", "{broken")), _told("error")),
}


GOLDEN = [(name, ()) for name in FIXED] + [("one question", TOOLS), ("a call and its result", TOOLS)]
"""Names of conversations, each with the tools that are offered in it."""


def fitting(family: str, messages: Sequence[Message], tools: Sequence[JsonObject]) -> tuple[Message, ...]:
    """The conversation as far as a family's own template can express it."""
    if family in WITHOUT_CALLS or (family == "hermes" and not tools):
        return tuple(one.model_copy(update={"tool_calls": (), "content": one.content or ""}) for one in messages)
    if family in ONE_CALL:
        return tuple(one.model_copy(update={"tool_calls": one.tool_calls[:1]}) for one in messages)
    return tuple(messages)


_snippets = st.sampled_from(
    ["<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>", "<|im_end|>", "\n", "\n\n", " ", "☃"]
)
texts = st.lists(_snippets | st.text(max_size=12), max_size=5).map("".join)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(texts, _values, max_size=3)
_arguments = st.one_of(
    _objects.map(json.dumps), _objects.map(lambda one: json.dumps(one, ensure_ascii=False, indent=1))
)
_calls = st.lists(st.tuples(st.sampled_from(["search", "edit", "finish"]), _arguments), min_size=1, max_size=3)
_exchange = st.one_of(
    texts.map(lambda content: [_user(content)]),
    texts.map(lambda content: [_said(content)]),
    st.builds(
        lambda content, calls, results: [_said(content, *calls), *(_told(one) for one in results)],
        st.none() | texts,
        _calls,
        st.lists(st.none() | texts, max_size=3),
    ),
    st.lists(texts, min_size=1, max_size=2).map(lambda contents: [_told(one) for one in contents]),
)
_systems = st.lists(texts.map(lambda content: Message(role="system", content=content)), max_size=1)
_tools = st.lists(st.sampled_from(TOOLS), max_size=3, unique_by=lambda tool: json.dumps(tool)).map(tuple)
conversations = st.builds(
    lambda system, question, rest, tools: Conversation((*system, _user(question), *chain.from_iterable(rest)), tools),
    _systems,
    texts,
    st.lists(_exchange, max_size=4),
    _tools,
)
