"""Converts a complete response to server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

from openhands_rl_plugin.models.gateway.json_text import Json, dump_object
from openhands_rl_plugin.models.gateway.requests import ClientRequest
from openhands_rl_plugin.models.gateway.responses import UpstreamResponse

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""

_END = ("finish_reason", "stop_reason")
_RECORDED_ELSEWHERE = frozenset({"index", "message", *_END})

DONE = b"data: [DONE]\n\n"


def events(answer: UpstreamResponse, call: ClientRequest) -> bytes:
    """All events of the response, up to and including ``[DONE]``."""
    seen = answer.for_client(call)
    usage = seen.get("usage")
    frame: Json = {name: value for name, value in seen.items() if name not in ("choices", "usage", "prompt_token_ids")}
    frame["object"] = "chat.completion.chunk"
    if call.wants_usage:
        frame["usage"] = None
    chunks = [{**frame, "choices": [chunk]} for choice in seen["choices"] for chunk in _chunks(choice)]
    if "prompt_token_ids" in seen:
        chunks[0]["prompt_token_ids"] = seen["prompt_token_ids"]
    if call.wants_usage:
        chunks.append({**frame, "choices": [], "usage": usage})
    return b"".join((*(event(answer.restore_ids(dump_object(chunk))) for chunk in chunks), DONE))


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: %s\n\n" % data


def _chunks(choice: Json) -> Iterator[Json]:
    """Chunks with the role, the text, each tool call, and the finish reason."""
    index, message = choice.get("index", 0), choice["message"]

    def chunk(delta: Json, about: Json) -> Json:
        return {"index": index, "delta": delta, "finish_reason": None, **about}

    yield chunk({"role": "assistant", "content": ""}, {})
    # Fields of the whole choice (logprobs, token ids) come with the text, as vLLM sends them.
    said = {name: value for name, value in message.items() if name not in ("role", "tool_calls") and value is not None}
    about = {name: value for name, value in choice.items() if name not in _RECORDED_ELSEWHERE and value is not None}
    if said or about:
        yield chunk(said, about)
    for at, tool_call in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": at, **tool_call}]}, {})
    yield chunk({}, {name: choice[name] for name in _END if choice.get(name) is not None})
