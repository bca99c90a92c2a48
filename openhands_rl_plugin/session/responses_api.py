"""OpenAI's Responses API (``POST /v1/responses``), which Codex and OpenHands with GPT-5 speak, as chat completions.

Source of the format: https://platform.openai.com/docs/api-reference/responses and /responses-streaming.
"""

from __future__ import annotations

import json
from typing import Any

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.session.protocol import AnswerStream, WireProtocol, as_completion, event, texts_of
from openhands_rl_plugin.session.requests import ClientRequest, Unrecordable, client_request, parsed_body
from openhands_rl_plugin.session.responses import UpstreamResponse
from openhands_rl_plugin.session.token_id_text import Json, dump_object, parse_object

_PARAMETERS = ("temperature", "top_p", "tool_choice", "parallel_tool_calls")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The parts that are text, and the field that has it."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output")
_MESSAGE = "message"


def _parse(body: bytes) -> ClientRequest:
    document = parsed_body(body)
    given = document.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    instructions = document.get("instructions")
    messages = _messages(items)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    settings = {name: document[name] for name in _PARAMETERS if name in document}
    for name, value in (
        ("max_tokens", document.get("max_output_tokens")),
        ("reasoning_effort", (document.get("reasoning") or {}).get("effort")),
    ):
        if value is not None:
            settings[name] = value
    continues, conversation = document.get("previous_response_id"), document.get("conversation")
    unknown = "the request continues a conversation that the model server holds" if conversation else ""
    if any(item.get("type") == "item_reference" for item in items):
        unknown = "the request refers to items that the model server holds"
    return client_request(
        body,
        document,
        messages,
        [_tool(tool) for tool in document.get("tools") or ()],
        settings,
        instructions=bool(instructions),
        continues=continues if isinstance(continues, str) else "",
        unknown_before=unknown,
    )


def _messages(items: list[Json]) -> list[Json]:
    """Items as chat messages. What the model said in a row (reasoning, text, calls) is one message."""
    messages: list[Json] = []
    said: list[Json] = []
    for item in items:
        kind = item.get("type") or _MESSAGE
        if kind in _OUTPUTS:
            message = {"role": "tool", "tool_call_id": item.get("call_id") or item.get("id")}
            message["content"] = _content(item.get("output"))
        elif kind == _MESSAGE and item.get("role") != "assistant":
            message = {"role": item.get("role"), "content": _content(item.get("content"))}
        else:
            if kind != "item_reference":
                said.append(item)
            continue
        if said:
            messages.append({"role": "assistant", **_said(said)})
            said = []
        messages.append(message)
    return [*messages, {"role": "assistant", **_said(said)}] if said else messages


def _said(items: list[Json]) -> Json:
    """What items of the model say; those of the server's own tools are kept as ``items``."""
    texts, thoughts, calls, others = [], [], [], []
    for item in items:
        match item.get("type") or _MESSAGE:
            case "message":
                texts.append(texts_of(_content(item.get("content")), "text"))
            case "reasoning":
                thought = texts_of(item.get("content"), "reasoning_text")
                thoughts.append(thought or _summary(item.get("summary")))
            case "function_call":
                calls.append(_call(item, item.get("arguments")))
            case "custom_tool_call":
                calls.append(_call(item, item.get("input")))
            case "local_shell_call" | "shell_call" as name:
                calls.append(_call({"name": name.removesuffix("_call"), **item}, json.dumps(item.get("action"))))
            case _:
                others.append(item)
    content = "".join(texts)
    said: Json = {"content": content or None if calls else content}
    if calls:
        said["tool_calls"] = calls
    if thought := "\n".join(filter(None, thoughts)):
        said["reasoning_content"] = thought
    return {**said, "items": others} if others else said


def _summary(summary: object) -> str:
    parts = summary if isinstance(summary, list) else ()
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _call(item: Json, arguments: object) -> Json:
    function = {"name": item.get("name"), "arguments": arguments if arguments is not None else ""}
    return {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}


def _content(content: object) -> object:
    """Content with the parts' types as chat completions call them."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content if content is not None else ""
    return [
        {"type": "text", "text": part.get(_TEXTS[part["type"]])} if part.get("type") in _TEXTS else part
        for part in content
    ]


def _tool(tool: Any) -> JsonObject:
    """A function as a tool of chat completions; any other tool as it is."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _completion(response: Json) -> UpstreamResponse:
    output, status = response.get("output"), response.get("status", "completed")
    if status not in ("completed", "incomplete"):
        raise Unrecordable(f"the response is {status!s:.20}, not completed")
    if not output:
        raise Unrecordable("the response has no output")
    said = _said(output)
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = reason or ("tool_calls" if "tool_calls" in said else "stop")
    names = ("id", "model", "created_at", "status", "incomplete_details", "service_tier")
    about = {name: response[name] for name in names if response.get(name)}
    usage = response.get("usage")
    return as_completion(said, finish, _usage(usage if isinstance(usage, dict) else {}), about)


def _usage(given: Json) -> Json:
    details = {
        "prompt_tokens_details": given.get("input_tokens_details"),
        "completion_tokens_details": given.get("output_tokens_details"),
    }
    counts = {"prompt_tokens": given.get("input_tokens"), "completion_tokens": given.get("output_tokens")}
    return {name: value for name, value in {**counts, **details}.items() if value is not None}


class ResponseStream(AnswerStream):
    """A streamed response."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._items: dict[int, Json] = {}
        self._response: Json = {}

    def read(self) -> UpstreamResponse:
        """As ``AnswerStream.read``."""
        # Some servers leave the output out of the last event.
        items = [item for _, item in sorted(self._items.items())]
        return _completion({**self._response, "output": self._response.get("output") or items})

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        match data.get("type"):
            case "response.output_item.done":
                self._items[int(data.get("output_index", len(self._items)))] = dict(data["item"])
            case "response.completed" | "response.incomplete" | "response.failed":
                self._response = dict(data["response"])
                self.ending = self.done = True
            case "error":
                raise ValueError("an event of the stream is an error")


def _error_event(error: Json) -> bytes:
    told = {"type": "error", "code": str(error.get("code")), "message": error.get("message"), "param": None}
    # OpenAI's client raises only for an event with a field ``error``.
    return event(dump_object({**told, "sequence_number": 0, "error": error}), "error")


RESPONSES = WireProtocol(
    path="responses",
    request=_parse,
    response=lambda body: _completion(parse_object(body) or {}),
    stream=ResponseStream,
    error_event=_error_event,
)
