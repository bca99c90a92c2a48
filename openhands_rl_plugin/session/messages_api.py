"""Anthropic's Messages API (``POST /v1/messages``), which Claude Code speaks, as chat completions.

Source of the format: https://docs.anthropic.com/en/api/messages and /en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.session.protocol import AnswerStream, WireProtocol, as_completion, event, texts_of
from openhands_rl_plugin.session.requests import ClientRequest, client_request, parsed_body
from openhands_rl_plugin.session.responses import UpstreamResponse
from openhands_rl_plugin.session.token_id_text import Json, dump_object, parse_object

# Claude Code's first system block differs from request to request, and is no part of the prompt.
_ATTRIBUTION = "x-anthropic-billing-header:"
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "tool_choice")
_EXACT = "input_text"
"""Where a tool's input is kept as the model wrote it; ``input`` is what was parsed from it."""


def _parse(body: bytes) -> ClientRequest:
    document = parsed_body(body)
    given = (each for message in document["messages"] for each in _messages(message))
    messages = [*_system(document.get("system")), *given]
    settings = {name: document[name] for name in _PARAMETERS if name in document}
    if (stop := document.get("stop_sequences")) is not None:
        settings["stop"] = stop
    tools = document.get("tools") or ()
    return client_request(body, document, messages, [_tool(tool) for tool in tools], settings)


def _system(system: Any) -> Iterator[Json]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    said = [_part(block) for block in blocks if not str(block.get("text")).startswith(_ATTRIBUTION)]
    if said:
        yield {"role": "system", "content": said}


def _messages(message: Any) -> Iterator[Json]:
    """One message as those of chat completions: each tool result is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        yield {"role": role, "content": content}
        return
    if role == "assistant":
        yield {"role": role, **_said(content)}
        return
    parts: list[Json] = []
    for block in content:
        if block.get("type") != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        result = block.get("content")
        said = [_part(each) for each in result if isinstance(each, dict)] if isinstance(result, list) else result
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said or ""}
    if parts:
        yield {"role": role, "content": parts}


def _said(blocks: Iterable[Json]) -> Json:
    """What an assistant's blocks say; those of the server's own tools are kept as ``blocks``."""
    blocks = list(blocks)
    said: Json = {"content": texts_of(blocks, "text") or None}
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    if calls:
        said["tool_calls"] = calls
    else:
        said["content"] = said["content"] or ""
    if thought := "".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"):
        said["reasoning_content"] = thought
    others = [each for each in blocks if each.get("type") not in ("text", "tool_use", "thinking", "redacted_thinking")]
    return {**said, "blocks": others} if others else said


def _call(block: Json) -> Json:
    arguments = block.get(_EXACT) or json.dumps(block.get("input") or {}, ensure_ascii=False)
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _part(block: Json) -> Json:
    return {"type": "text", "text": block.get("text")} if block.get("type") == "text" else {"type": block.get("type")}


def _tool(tool: Any) -> JsonObject:
    """A tool of the client as one of chat completions; a tool of the server's own (web search) as it is."""
    if "input_schema" not in tool:
        return tool
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _completion(message: Json) -> UpstreamResponse:
    given = message.get("usage")
    about = {name: message[name] for name in ("id", "model", "stop_reason", "stop_sequence") if message.get(name)}
    usage = _usage(given if isinstance(given, dict) else {})
    return as_completion(_said(message["content"]), message.get("stop_reason"), usage, about)


def _usage(given: Json) -> Json:
    """Anthropic's ``input_tokens`` are those that no cache had or took."""
    count = {name: value if type(value) is int else 0 for name, value in given.items()}
    cached = count.get("cache_read_input_tokens", 0)
    return {
        "prompt_tokens": count.get("input_tokens", 0) + cached + count.get("cache_creation_input_tokens", 0),
        "completion_tokens": count.get("output_tokens", 0),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class MessageStream(AnswerStream):
    """A streamed message."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._message: Json = {}
        self._blocks: dict[int, Json] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}

    def read(self) -> UpstreamResponse:
        """As ``AnswerStream.read``."""
        for (index, name), parts in self._texts.items():
            block = self._blocks[index]
            block[name] = (block.get(name) or "") + "".join(parts)
        blocks = [block for _, block in sorted(self._blocks.items())]
        return _completion({**self._message, "content": blocks})

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        match data.get("type"):
            case "message_start":
                self._message = dict(data["message"])
            case "content_block_start":
                self._blocks[int(data["index"])] = dict(data["content_block"])
            case "content_block_delta":
                self._add(int(data["index"]), data["delta"])
            case "message_delta":
                self._message |= data["delta"]
                self._message["usage"] = {**(self._message.get("usage") or {}), **(data.get("usage") or {})}
                self.ending |= bool(self._message.get("stop_reason"))
            case "message_stop":
                self.ending = self.done = True
            case "error":
                raise ValueError("an event of the stream is an error")

    def _add(self, index: int, delta: Json) -> None:
        names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
        if (name := names.get(delta["type"])) is not None:
            if index not in self._blocks:
                raise ValueError("a delta belongs to no block")
            kept = _EXACT if name == "partial_json" else name
            self._texts.setdefault((index, kept), []).append("" + delta[name])


def _error_event(error: Json) -> bytes:
    return event(dump_object({"type": "error", "error": error}), "error")


MESSAGES = WireProtocol(
    path="messages",
    request=_parse,
    response=lambda body: _completion(parse_object(body) or {}),
    stream=MessageStream,
    error_event=_error_event,
)
