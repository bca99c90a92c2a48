"""Requests of clients, and the requests to the model server that are made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from openhands_rl_plugin.core.messages import RECORDED_PARAMETERS, WireMessage
from openhands_rl_plugin.core.types import JsonObject, SamplingParams
from openhands_rl_plugin.models.gateway.json_text import Json, dump_object, parse_object

EXTENSIONS: Mapping[str, bool] = {"return_token_ids": True, "logprobs": True}
"""Fields that the gateway adds to requests, unless the client set them."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Unrecordable(Exception):
    """A request or response cannot be recorded; ``str()`` is the reason, without any of its content."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request for a chat completion. ``body`` is the client's text, ``document`` the parsed object."""

    body: bytes
    document: Json
    messages: Sequence[WireMessage]
    tools: tuple[JsonObject, ...]

    @property
    def model(self) -> str:
        return str(self.document.get("model") or "")

    @property
    def streams(self) -> bool:
        return self.document.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Whether the stream must end with the token usage."""
        options = self.document.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def wants(self, extension: str) -> bool:
        """Whether the client itself requested one of ``EXTENSIONS``."""
        return bool(self.document.get(extension))

    @property
    def parameters(self) -> JsonObject:
        """The sampling parameters of the request, as the client wrote them."""
        return {name: self.document[name] for name in RECORDED_PARAMETERS if self.document.get(name) is not None}

    def sampling(self) -> SamplingParams | None:
        """The parameters as ``SamplingParams``; ``None`` when they have values that are not valid there."""
        stop = self.document.get("stop") or ()
        try:
            return SamplingParams(
                temperature=self.document.get("temperature"),
                top_p=self.document.get("top_p"),
                max_tokens=self.document.get("max_completion_tokens") or self.document.get("max_tokens"),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                seed=self.document.get("seed"),
            )
        except (ValidationError, TypeError):
            return None


def parse_request(body: bytes) -> ClientRequest:
    """Parse the body of a chat completion request. Raises ``Unrecordable`` for anything else."""
    document = parse_object(body)
    if document is None:
        raise Unrecordable("the request is not a JSON object")
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unrecordable("the request has no messages")
    tools = document.get("tools") or ()
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unrecordable("a tool of the request is not an object")
    return ClientRequest(
        body=body,
        document=document,
        messages=[_recordable(at, message) for at, message in enumerate(messages)],
        tools=tuple(tools),
    )


def upstream_body(call: ClientRequest, model: str, extensions: Mapping[str, bool]) -> bytes:
    """The body for the model server: never streamed, with the ``extensions`` that the client did not set."""
    document = call.document
    added = {name: value for name, value in extensions.items() if document.get(name) is None}
    untouched = model == call.model and not document.keys() & {"stream", "stream_options", *added}
    if not untouched:
        kept = {name: value for name, value in document.items() if name not in ("stream", "stream_options")}
        return dump_object({**kept, **added, "model": model})
    if not added:
        return call.body
    opening = call.body.index(b"{") + 1
    return b"".join((call.body[:opening], dump_object(added)[1:-1], b",", call.body[opening:]))


def _recordable(at: int, message: Any) -> WireMessage:
    """The message in the format of ``core.messages``; raises ``Unrecordable`` for any other format."""
    if not isinstance(message, dict) or (role := _ROLES.get(str(message.get("role")))) is None:
        raise Unrecordable(f"message {at} has an unknown role")
    content, calls = message.get("content"), message.get("tool_calls")
    known = content is None or isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))
    if not known or not (calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))):
        raise Unrecordable(f"message {at} has an unknown format")
    if not _is_text(message.get("tool_call_id")) or not _is_text(message.get("name")):
        raise Unrecordable(f"message {at} has a name or tool_call_id that is not a string")
    return message if role == message["role"] else {**message, "role": role}


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") != "text" or isinstance(part.get("text"), str))


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
        and _is_text(call.get("id"))
    )


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)
