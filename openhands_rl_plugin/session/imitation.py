"""Protocols without token ids, read as chat completions: what is recorded of them can be imitated only.

Anthropic's Messages API (``POST /v1/messages``), which Claude Code speaks, as in https://docs.anthropic.com/en/api/messages
and /en/docs/build-with-claude/streaming. OpenAI's Responses API (``POST /v1/responses``), which Codex and OpenHands
with GPT-5 speak, as in https://platform.openai.com/docs/api-reference/responses and /responses-streaming.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.models.engines.openai_wire import (
    ChatAnswer,
    Json,
    Unrecordable,
    dump_object,
    event,
    parse_object,
)
from openhands_rl_plugin.session.wire import AnswerStream, ClientRequest, WireProtocol, client_request

# Claude Code's first system block differs from request to request, and is no part of the prompt.
_ATTRIBUTION = "x-anthropic-billing-header:"
# Where a streamed tool's input is kept as the model wrote it.
_EXACT = "partial_json"
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "tool_choice", "parallel_tool_calls")
# What chat completions call the reasons of other protocols; one that is not here keeps its name.
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "max_output_tokens": "length",
}


def _parts(content: Any) -> Any:
    """Content with its texts as chat completions have them; of other parts, such as images, only the type."""
    if not isinstance(content, list):
        return content if content is not None else ""
    texts = [part.get("text", part.get("refusal")) for part in content]
    return [
        {"type": part.get("type")} if text is None else {"type": "text", "text": text}
        for part, text in zip(content, texts, strict=True)
    ]


def _said(items: Sequence[Json]) -> Json:
    """What the model said in blocks of a message, or in items of a response, as one message.

    What it did with the server's own tools, which no client answers, is left out.
    """
    texts, thoughts, calls = [], [], []
    for item in items:
        match item.get("type") or "message":
            case "text":
                texts.append(item["text"])
            case "message":
                said = _parts(item.get("content"))
                texts += [said] if isinstance(said, str) else [part["text"] for part in said]
            case "thinking":
                thoughts.append(item["thinking"])
            case "reasoning":
                thoughts += [part["text"] for part in item.get("content") or item.get("summary") or ()]
            case "tool_use":
                arguments = item.get(_EXACT) or json.dumps(item.get("input") or {}, ensure_ascii=False)
                calls.append(_call(item.get("id"), item.get("name"), arguments))
            case kind if "call_id" in item:
                arguments = item.get("arguments", item.get("input"))
                arguments = json.dumps(item.get("action")) if arguments is None else arguments
                calls.append(_call(item["call_id"], item.get("name") or kind.removesuffix("_call"), arguments))
    text = "".join(texts)
    message: Json = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if thought := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    return message


def _call(identity: Any, name: Any, arguments: Any) -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Json) -> JsonObject:
    """A function of the client as a tool of chat completions; a tool of the server's own (web search) as it is."""
    schema = tool.get("input_schema", tool.get("parameters"))
    if schema is None:
        return tool
    named = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**named, "parameters": schema}}


def _completion(given: Json, message: Json, reason: Any, *names: str) -> ChatAnswer:
    """A chat completion with one choice, which stopped for this ``reason`` of another protocol."""
    usage = given.get("usage") or {}
    count = {name: value for name, value in usage.items() if type(value) is int}
    # Anthropic's ``input_tokens`` are those that no cache had or took.
    cached = count.get("cache_read_input_tokens", 0)
    counts = {
        "prompt_tokens": count.get("input_tokens", 0) + cached + count.get("cache_creation_input_tokens", 0),
        "completion_tokens": count.get("output_tokens", 0),
        "prompt_tokens_details": usage.get("input_tokens_details") or {"cached_tokens": cached},
    }
    if details := usage.get("output_tokens_details"):
        counts["completion_tokens_details"] = details
    choice = {"index": 0, "message": message, "finish_reason": _FINISH_REASONS.get(reason, reason)}
    about = {name: given[name] for name in ("id", "model", *names) if given.get(name)}
    return ChatAnswer({**about, "choices": [choice], "usage": counts})


def _messages_request(body: bytes, document: Json) -> ClientRequest:
    system = document.get("system") or []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    blocks = [block for block in blocks if not str(block.get("text")).startswith(_ATTRIBUTION)]
    messages: list[Json] = [{"role": "system", "content": _parts(blocks)}] if blocks else []
    for message in document["messages"]:
        messages += _from_blocks(message["role"], message.get("content"))
    settings = {name: document[name] for name in _PARAMETERS if name in document}
    settings["stop"] = document.get("stop_sequences")
    return client_request(body, document, messages, [*map(_tool, document.get("tools") or ())], settings)


def _from_blocks(role: str, content: Any) -> list[Json]:
    """One message as those of chat completions: each tool result is a message of its own."""
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_said(content)]
    messages: list[Json] = []
    for block in content:
        if block.get("type") == "tool_result":
            result = {"tool_call_id": block.get("tool_use_id"), "content": _parts(block.get("content"))}
            messages.append({"role": "tool", **result})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _parts([block])
        else:
            messages.append({"role": role, "content": _parts([block])})
    return messages


def _message(message: Json) -> ChatAnswer:
    said, reason = _said(message["content"]), message.get("stop_reason")
    return _completion(message, said, reason, "stop_reason", "stop_sequence")


class MessageStream(AnswerStream):
    """A streamed message."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._message: Json = {}
        self._blocks: dict[int, Json] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        match data.get("type"):
            case "message_start":
                self._message = dict(data["message"])
            case "content_block_start":
                self._blocks[data["index"]] = dict(data["content_block"])
            case "content_block_delta":
                block = self._blocks[data["index"]]
                for name in data["delta"].keys() & {"text", "thinking", _EXACT}:
                    block[name] = block.get(name) or ""
                    self._texts.setdefault((data["index"], name), []).append("" + data["delta"][name])
            case "message_delta":
                self._message |= data["delta"]
                self._message["usage"] = {**(self._message.get("usage") or {}), **(data.get("usage") or {})}
                self.ending |= bool(self._message.get("stop_reason"))
            case "message_stop":
                self.ending = self.done = True

    def read(self) -> ChatAnswer:
        """As ``AnswerStream.read``."""
        for (index, name), parts in self._texts.items():
            self._blocks[index][name] += "".join(parts)
        return _message({**self._message, "content": [block for _, block in sorted(self._blocks.items())]})


def _responses_request(body: bytes, document: Json) -> ClientRequest:
    given = document.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    own = [item for item in items if item.get("type") != "item_reference"]
    instructions = document.get("instructions")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for is_said, group in groupby(own, _is_said):
        # What the model said in a row (reasoning, text, calls) is one message.
        run = [*group]
        messages += [_said(run)] if is_said else map(_observed, run)
    settings = {name: document[name] for name in _PARAMETERS if name in document}
    settings["max_tokens"] = document.get("max_output_tokens")
    settings["reasoning_effort"] = (document.get("reasoning") or {}).get("effort")
    is_held = document.get("conversation") or len(own) < len(items)
    return client_request(
        body,
        document,
        messages,
        [*map(_tool, document.get("tools") or ())],
        settings,
        instructions=bool(instructions),
        continues=str(document.get("previous_response_id") or ""),
        unknown_before="the request refers to what the model server holds" if is_held else "",
    )


def _is_said(item: Json) -> bool:
    """Whether the model said it."""
    kind = item.get("type") or "message"
    return item.get("role") == "assistant" if kind == "message" else not kind.endswith("_output")


def _observed(item: Json) -> Json:
    """A message to the model."""
    if (item.get("type") or "message") == "message":
        return {"role": item.get("role"), "content": _parts(item.get("content"))}
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))}


def _response(response: Json) -> ChatAnswer:
    output, status = response.get("output"), response.get("status", "completed")
    if status not in ("completed", "incomplete") or not output:
        raise Unrecordable(f"the response is {status!s:.20}, or has no output")
    said = _said(output)
    reason = (response.get("incomplete_details") or {}).get("reason")
    finish = reason or ("tool_calls" if "tool_calls" in said else "stop")
    return _completion(response, said, finish, "created_at", "status", "incomplete_details", "service_tier")


class ResponseStream(AnswerStream):
    """A streamed response."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._items: dict[int, Json] = {}
        self._response: Json = {}

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        match data.get("type"):
            case "response.output_item.done":
                self._items[data.get("output_index", len(self._items))] = data["item"]
            case "response.completed" | "response.incomplete" | "response.failed":
                self._response = data["response"]
                self.ending = self.done = True

    def read(self) -> ChatAnswer:
        """As ``AnswerStream.read``."""
        # Some servers leave the output out of the last event.
        items = [item for _, item in sorted(self._items.items())]
        return _response({**self._response, "output": self._response.get("output") or items})


def _error_event(error: Json) -> bytes:
    """An error in a form that clients of both protocols read: OpenAI's raises only for a field ``error``."""
    about = {"code": str(error.get("code")), "message": error.get("message"), "param": None, "sequence_number": 0}
    return event(dump_object({"type": "error", **about, "error": error}), "error")


MESSAGES = WireProtocol(
    "messages", _messages_request, lambda body: _message(parse_object(body) or {}), MessageStream, _error_event
)
RESPONSES = WireProtocol(
    "responses", _responses_request, lambda body: _response(parse_object(body) or {}), ResponseStream, _error_event
)
