"""Completions, streams and errors in the shapes that OpenAI-like servers give them, with what they mean."""

from __future__ import annotations

from typing import Any

from openhands_rl_plugin.core.types import Message, ToolCall

Json = dict[str, Any]


def call(identity: Any, name: str, arguments: Any, **more: Any) -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def says(content: str | None = None, *calls: tuple[str, str, str]) -> Message:
    return Message(
        role="assistant",
        content=content,
        tool_calls=tuple(ToolCall(id=each[0], name=each[1], arguments=each[2]) for each in calls),
    )


LOOK = ("c1", "look", "{}")
BOTH = says(None, ("a", "look", '{"path":"a"}'), ("b", "find", '{"path":"b"}'))
A, B = call("a", "look", '{"path":"a"}'), call("b", "find", '{"path":"b"}')
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
DETAIL = {"type": "reasoning.text", "text": "Hm.", "signature": None, "format": "unknown", "index": 0}
SUMMARY = {"type": "reasoning.summary", "summary": "Hm.", "format": "openai-responses-v1", "index": 0}
CIPHER = {"type": "reasoning.encrypted", "data": "gAAA", "format": "openai-responses-v1", "index": 1}

MESSAGES: dict[str, tuple[Json, Message, str | None]] = {
    "no arguments": ({"content": None, "tool_calls": [call("c1", "look", None)]}, says(None, LOOK), None),
    "empty arguments": ({"content": "", "tool_calls": [call("c1", "look", "")]}, says(None, LOOK), None),
    "null as text": ({"tool_calls": [call("c1", "look", "null")]}, says(None, LOOK), None),
    "absent arguments": ({"tool_calls": [{"id": "c1", "function": {"name": "look"}}]}, says(None, LOOK), None),
    "arguments as object": (
        {"tool_calls": [call("c1", "look", {"a": "ü"})]},
        says(None, ("c1", "look", '{"a":"ü"}')),
        None,
    ),
    "null id": ({"tool_calls": [call(None, "look", "{}")]}, says(None, ("", "look", "{}")), None),
    "number as id": ({"tool_calls": [call(7, "look", "{}")]}, says(None, ("7", "look", "{}")), None),
    "null calls": ({"content": "Hi", "tool_calls": None, "function_call": None}, says("Hi"), None),
    "no calls": ({"content": "Hi", "tool_calls": [], "refusal": None}, says("Hi"), None),
    "former call": ({"function_call": {"name": "look", "arguments": None}}, says(None, ("", "look", "{}")), None),
    "text part": ({"content": [{"type": "text", "text": "Hi"}]}, says("Hi"), None),
    "part with nulls": ({"content": [{"type": "text", "text": "Hi", "image_url": None}, None]}, says("Hi"), None),
    "mistral": ({"content": [THOUGHT, {"type": "text", "text": "Hi"}]}, says("Hi"), "Hm."),
    "deepseek": ({"content": "Hi", "reasoning_content": "Hm."}, says("Hi"), "Hm."),
    "vllm": ({"content": "Hi", "reasoning": "Hm.", "reasoning_content": None}, says("Hi"), "Hm."),
    "openrouter": ({"content": "Hi", "reasoning": None, "reasoning_details": [DETAIL]}, says("Hi"), "Hm."),
    "summary": ({"content": "Hi", "reasoning": "", "reasoning_details": [SUMMARY, CIPHER]}, says("Hi"), "Hm."),
}
"""Name -> the message of a completion, what it says, and its reasoning."""

STREAMS: dict[str, tuple[list[Json], Message, str | None]] = {
    "no index, one chunk": ([{"role": "assistant", "tool_calls": [A, B]}], BOTH, None),
    "no index": ([{"content": None, "tool_calls": [A]}, {"tool_calls": [B]}], BOTH, None),
    "index null": ([{"tool_calls": [{**A, "index": None}]}, {"tool_calls": [{**B, "index": None}]}], BOTH, None),
    "index 0 again": ([{"tool_calls": [{**A, "index": 0}]}, {"tool_calls": [{**B, "index": 0}]}], BOTH, None),
    "index 0 again and empty ids": (
        [
            {"tool_calls": [call("", "look", '{"path":"a"}', index=0)]},
            {"tool_calls": [call("", "look", "{}", index=0)]},
        ],
        says(None, ("", "look", '{"path":"a"}'), ("", "look", "{}")),
        None,
    ),
    "an id in every piece": (
        [
            {"tool_calls": [call("a", "look", '{"path"', index=0)]},
            {"tool_calls": [call("a", "look", ':"a"}', index=0)]},
            {"tool_calls": [call("b", "find", None, index=1)], "content": None},
            {"tool_calls": [call("other", None, '{"path":"b"}', index=1)]},  # pyright: ignore[reportArgumentType]
        ],
        BOTH,
        None,
    ),
    "pieces without index": (
        [{"tool_calls": [call("c1", "look", None)]}, {"tool_calls": [{"function": {"arguments": "{}"}}]}],
        says(None, LOOK),
        None,
    ),
    "no arguments at all": ([{"tool_calls": [call("c1", "look", None, index=0)]}], says(None, LOOK), None),
    "arguments as object": (
        [{"tool_calls": [call("c1", "look", {"a": 1})]}],
        says(None, ("c1", "look", '{"a": 1}')),
        None,
    ),
    "nulls": (
        [{"content": "H", "tool_calls": None, "refusal": None}, {"content": "i", "role": None}],
        says("Hi"),
        None,
    ),
    "mistral": ([{"content": [THOUGHT]}, {"content": [THOUGHT]}, {"content": "Hi"}], says("Hi"), "Hm.Hm."),
    "openrouter": (
        [{"reasoning": "Hm.", "reasoning_details": [DETAIL]}, {"reasoning_details": [DETAIL]}, {"content": "Hi"}],
        says("Hi"),
        "Hm.Hm.",
    ),
    "litellm": ([{"reasoning_content": "Hm.", "thinking_blocks": [THOUGHT]}, {"content": "Hi"}], says("Hi"), "Hm."),
}
"""Name -> the deltas of a stream, what they say, and its reasoning."""


def error(**fields: Any) -> Json:
    return {"error": {"message": "Provider returned error", **fields}, "user_id": "u"}


def choice_error(code: Any) -> Json:
    failed = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "error"}
    return {"id": "g1", "choices": [{**failed, "error": {"code": code, "message": "Provider returned error"}}]}


ERRORS: dict[str, tuple[Json, bool]] = {
    "openrouter": (error(code=502, metadata={"provider_name": "x"}), True),
    "number as text": (error(code="429"), True),
    "openai": (error(type="tokens", param=None, code="rate_limit_exceeded"), True),
    "busy, of a bad type": (error(type="invalid_request_error", code="rate_limit_exceeded"), True),
    "anthropic": ({"type": "error", **error(type="overloaded_error")}, True),
    "google": (error(code=503, status="UNAVAILABLE"), True),
    "in a choice": (choice_error(502), True),
    "former vllm": (
        {"object": "error", "message": "Provider returned error", "type": "InternalServerError", "code": 500},
        True,
    ),
    "fastchat": ({"object": "error", "message": "Provider returned error", "code": 50002}, True),
    "a text": ({"error": "Provider returned error"}, True),
    "refused": (error(code=400), False),
    "too long": (error(type="invalid_request_error", code="context_length_exceeded"), False),
    "forbidden choice": (choice_error("403"), False),
    "litellm": (error(type="None", param="None", code="404"), False),
}
"""Name -> the body of a response with status 200, and whether to ask again."""
