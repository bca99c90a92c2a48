"""Completions, streams and errors in the shapes that OpenAI-like servers give them, with what they mean."""

from __future__ import annotations

from typing import Any

from openhands_rl_plugin.core.types import Message, ToolCall

Json = dict[str, Any]


def call(identity: Any, name: Any, arguments: Any, **more: Any) -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def calls(*entries: Json, **more: Any) -> Json:
    return {"tool_calls": list(entries), **more}


def reply(content: str | None, *given: tuple[str, str, str]) -> Message:
    called = tuple(ToolCall(id=identity, name=name, arguments=arguments) for identity, name, arguments in given)
    return Message(role="assistant", content=content, tool_calls=called)


HI, LOOK, FORMER = reply("Hi"), reply(None, ("c1", "look", "{}")), reply(None, ("", "look", "{}"))
OBJECT = reply(None, ("c1", "look", '{"a":"ü"}'))
BOTH = reply(None, ("a", "look", '{"path":"a"}'), ("b", "find", '{"path":"b"}'))
AGAIN = (("look", "{}"), ("look", "{}"), ("find", None), ("look", "{}"))
AGAIN_LOOK = reply(None, *(("", name, "{}") for name, _ in AGAIN))
TWINS = reply(None, ("a", "look", '{"path":"a"}'), ("a", "find", '{"path":"b"}'))
A, B = call("a", "look", '{"path":"a"}'), call("b", "find", '{"path":"b"}')
PIECES = (
    call("a", "look", '{"path"', index=0),
    call("b", "find", None, index=1),
    call("another", None, '{"path":"b"}', index=1),
    call("a", "look", ':"a"}', index=0),
)
TEXT = {"type": "text", "text": "Hi", "image_url": None}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
DETAIL = {"type": "reasoning.text", "text": "Hm.", "signature": None, "format": "unknown", "index": 0}
SUMMARY = {"type": "reasoning.summary", "summary": "Hm.", "format": "openai-responses-v1", "index": 0}
CIPHER = {"type": "reasoning.encrypted", "data": "gAAA", "format": "openai-responses-v1", "index": 1}

MESSAGES: dict[str, tuple[Json, Message, str | None]] = {
    "no arguments": (calls(call("c1", "look", None), content=None), LOOK, None),
    "empty arguments": (calls(call("c1", "look", ""), content=""), LOOK, None),
    "null as text": (calls(call("c1", "look", "null")), LOOK, None),
    "null as content": (calls(call("c1", "look", "{}"), content="null"), LOOK, None),
    "null in a part": (calls(call("c1", "look", "{}"), content=[{"type": "text", "text": "null"}]), LOOK, None),
    "parts of nothing": (calls(call("c1", "look", "{}"), content=[{"type": "text", "text": None}, None]), LOOK, None),
    "null as an answer": ({"content": "null", "tool_calls": "null"}, reply("null"), None),
    "absent arguments": (calls({"id": "c1", "function": {"name": "look"}}), LOOK, None),
    "arguments as object": (calls(call("c1", "look", {"a": "ü"})), OBJECT, None),
    "null id": (calls(call(None, "look", "{}")), FORMER, None),
    "number as id": (calls(call(7, "look", "{}")), reply(None, ("7", "look", "{}")), None),
    "former call": ({"function_call": {"name": "look", "arguments": None}}, FORMER, None),
    "null calls": ({"content": "Hi", "tool_calls": None, "function_call": None}, HI, None),
    "null calls as text": ({"content": "Hi", "tool_calls": "null"}, HI, None),
    "empty calls": ({"content": "Hi", "tool_calls": [None, {}], "refusal": None}, HI, None),
    "arguments of PHP": (calls(call("c1", "look", [])), LOOK, None),
    "parts with nulls": ({"content": [TEXT, None]}, HI, None),
    "mistral": ({"content": [THOUGHT, TEXT]}, HI, "Hm."),
    "deepseek": ({"content": "Hi", "reasoning_content": "Hm."}, HI, "Hm."),
    "vllm": ({"content": "Hi", "reasoning": "Hm.", "reasoning_content": None}, HI, "Hm."),
    "openrouter": ({"content": "Hi", "reasoning": None, "reasoning_details": [DETAIL]}, HI, "Hm."),
    "summary": ({"content": "Hi", "reasoning": "", "reasoning_details": [SUMMARY, CIPHER]}, HI, "Hm."),
}
"""Name -> the message of a completion, what it says, and its reasoning."""

STREAMS: dict[str, tuple[list[Json], Message, str | None]] = {
    "no index, one chunk": ([calls(A, B, role="assistant")], BOTH, None),
    "no index": ([calls(A, content=None), calls(B)], BOTH, None),
    "index null": ([calls({**A, "index": None}), calls({**B, "index": None})], BOTH, None),
    "index 0 again": ([calls({**A, "index": 0}), calls({**B, "index": 0})], BOTH, None),
    "index 0 again, empty ids": ([calls(call("", name, given, index=0)) for name, given in AGAIN], AGAIN_LOOK, None),
    "one id for both": ([calls({**A, "index": 0}), calls({**B, "id": "a", "index": 0})], TWINS, None),
    "null calls as text": ([{"content": "H", "tool_calls": "null"}, {"content": "i"}], HI, None),
    "null as content": ([calls(A, content="null"), calls(B, content="null")], BOTH, None),
    "null as content before": ([{"role": "assistant", "content": "null"}, calls(A), calls(B)], BOTH, None),
    "fragments, ids in some": ([calls(piece) for piece in PIECES], BOTH, None),
    "no index again": ([calls(call("c1", "look", None)), calls({"function": {"arguments": "{}"}})], LOOK, None),
    "no arguments at all": ([calls(call("c1", "look", None, index=0))], LOOK, None),
    "arguments as object": ([calls(call("c1", "look", {"a": "ü"}))], OBJECT, None),
    "nulls": ([{"content": "H", "tool_calls": None, "role": None}, {"content": "i", "tool_calls": [None]}], HI, None),
    "mistral": ([{"content": [THOUGHT]}, {"content": [THOUGHT]}, {"content": "Hi"}], HI, "Hm.Hm."),
    "openrouter": ([{"reasoning": "Hm.", "reasoning_details": [DETAIL]}, {"content": "Hi"}], HI, "Hm."),
    "details only": ([{"reasoning_details": [DETAIL]}, {"reasoning_details": [DETAIL], "content": "Hi"}], HI, "Hm.Hm."),
    "litellm": ([{"reasoning_content": "Hm.", "thinking_blocks": [THOUGHT]}, {"content": "Hi"}], HI, "Hm."),
}
"""Name -> the deltas of a stream, what they say, and its reasoning."""

WORDS = {"message": "Provider returned error"}


def error(**fields: Any) -> Json:
    return {"error": {**WORDS, **fields}, "user_id": "u"}


def in_choice(code: Any) -> Json:
    failed = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "error"}
    return {"id": "g1", "choices": [{**failed, "error": {**WORDS, "code": code}}]}


AGAIN: tuple[Json, ...] = (
    error(code=502, metadata={"provider_name": "x"}),
    error(code="429"),
    error(type="tokens", param=None, code="rate_limit_exceeded"),
    error(type="invalid_request_error", code="rate_limit_exceeded"),
    error(code=503, status="UNAVAILABLE"),
    {"type": "error", **error(type="overloaded_error")},
    in_choice(502),
    {"object": "error", **WORDS, "type": "InternalServerError", "code": 50002},
    {"error": WORDS["message"]},
    {"code": 50301, **WORDS, "data": None},
    {"error": WORDS["message"], "error_type": "overloaded"},
)
REFUSED: tuple[Json, ...] = (
    error(code=400),
    error(type="invalid_request_error", code="context_length_exceeded"),
    error(type="None", param="None", code="404"),
    in_choice("403"),
    {"error": WORDS["message"], "error_type": "validation"},
)
"""Bodies of responses with status 200: of errors to ask again after, and of others."""
