"""Answers of Anthropic's Messages API and of OpenAI's Responses API, whole and as the events of their streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]


def message(*blocks: Body, model: str = "policy", stop: str = "end_turn", number: int = 1) -> Body:
    """A message of the Messages API."""
    usage = {"input_tokens": 7, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 3, "output_tokens": 11}
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(blocks),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }


def message_events(whole: Body) -> list[bytes]:
    """``whole`` as it is streamed: every text in parts of four characters, with a ping among them."""
    return [b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json.dumps(each).encode()) for each in _message(whole)]


def _message(whole: Body) -> Iterator[Body]:
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 1}}
    yield {"type": "message_start", "message": begun}
    yield {"type": "ping"}
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        empty: Body = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty.get(kind, {})}}
        text = {"text": "text", "thinking": "thinking"}.get(kind)
        written = block[text] if text else json.dumps(block["input"]) if kind == "tool_use" else ""
        name = {"text": "text_delta", "thinking": "thinking_delta"}.get(kind, "input_json_delta")
        for part in _cut(written):
            delta = {"type": name, "partial_json" if name == "input_json_delta" else str(text): part}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": "signed"}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def response(*items: Body, model: str = "policy", number: int = 1, **changes: Any) -> Body:
    """A response of the Responses API."""
    usage = {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 20},
        "output_tokens": 11,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 41,
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [{**item, "id": f"item_{number}_{at}"} for at, item in enumerate(items)],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": usage,
        **changes,
    }


def text_item(text: str) -> Body:
    """What the model says."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part]}


def call_item(name: str, arguments: Body, identity: str) -> Body:
    """A call of a function."""
    encoded = json.dumps(arguments)
    return {"type": "function_call", "call_id": identity, "name": name, "arguments": encoded, "status": "completed"}


def reasoning_item(text: str) -> Body:
    """What the model thinks, summed up."""
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "encrypted_content": "xyz"}


def response_events(whole: Body) -> list[bytes]:
    """``whole`` as it is streamed."""
    return [
        b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json.dumps({**each, "sequence_number": at}).encode())
        for at, each in enumerate(_response(whole))
    ]


def _response(whole: Body) -> Iterator[Body]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **_empty(item)}}
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part, place = item["content"][0], {**place, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
            for cut in _cut(part["text"]):
                yield {"type": "response.output_text.delta", **place, "delta": cut, "logprobs": []}
            yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": part}
        elif item["type"] == "function_call":
            for cut in _cut(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **place, "delta": cut}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    ended = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    yield {"type": ended, "response": whole}


def _empty(item: Body) -> Body:
    return {"message": {"content": []}, "function_call": {"arguments": ""}}.get(item["type"], {})


def _cut(text: str) -> Iterator[str]:
    for at in range(0, len(text), 4):
        yield text[at : at + 4]
