"""Requests of clients, and the requests to the model server that are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from openhands_rl_plugin.core.messages import WireMessage, calls_in, recorded_parameters, sampling_in, wire_calls
from openhands_rl_plugin.core.types import JsonObject, SamplingParams
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.token_id_text import DEEPEST, Json, dump_object, parse_object

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Unrecordable(Exception):
    """A request or response cannot be recorded; ``str()`` is the reason, without any of its content."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request for a completion. ``body`` is the client's text, ``document`` the parsed object.

    ``messages``, ``tools`` and ``settings`` (the sampling parameters) are in the format of chat completions, whatever
    the protocol. ``instructions``: whether the first message holds for this request only. ``continues``: the id of an
    earlier response whose conversation comes before ``messages``. ``unknown_before``: why it is not known what does.
    """

    body: bytes
    document: Json
    messages: Sequence[WireMessage]
    tools: tuple[JsonObject, ...]
    settings: Json
    instructions: bool = False
    continues: str = ""
    unknown_before: str = ""

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
        """Whether the client itself requested a field that the gateway may add, such as ``logprobs``."""
        return bool(self.document.get(extension))

    @property
    def parameters(self) -> JsonObject:
        """The sampling parameters of the request."""
        return recorded_parameters(self.settings)

    def sampling(self, filled: Json) -> SamplingParams:
        """The parameters with those ``filled`` in for it; none where a value is not valid."""
        try:
            return SamplingParams.model_validate(dict(sampling_in({**self.settings, **filled})))
        except (ValidationError, TypeError):
            return SamplingParams()


def parsed_body(body: bytes) -> Json:
    """The JSON object of a request. Raises ``Unrecordable`` for anything else."""
    document = parse_object(body)
    if document is None:
        raise Unrecordable(f"the request is not a JSON object, or has more than {DEEPEST} levels")
    return document


def client_request(
    body: bytes, document: Json, messages: Any, tools: Any, settings: Json, **about: Any
) -> ClientRequest:
    """A request whose ``messages`` and ``tools`` are checked. Raises ``Unrecordable``."""
    if not isinstance(messages, list) or not messages:
        raise Unrecordable("the request has no messages")
    tools = tools or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise Unrecordable("a tool of the request is not an object")
    recordable = [_recordable(at, message) for at, message in enumerate(messages)]
    return ClientRequest(
        body=body, document=document, messages=recordable, tools=tuple(tools), settings=settings, **about
    )


def upstream_body(call: ClientRequest, model: str, added: Json) -> bytes:
    """The body for the model server: the client's own text, with the fields ``added``, and for ``model``."""
    if model != call.model or call.document.keys() & added.keys():
        return dump_object({**call.document, **added, "model": model})
    if not added:
        return call.body
    opening = call.body.index(b"{") + 1
    return b"".join((call.body[:opening], dump_object(added)[1:-1], b",", call.body[opening:]))


def _recordable(at: int, message: Any) -> WireMessage:
    """The message in the format of ``core.messages``; raises ``Unrecordable`` for any other format."""
    if not isinstance(message, dict) or (role := _ROLES.get(str(message.get("role")))) is None:
        raise Unrecordable(f"message {at} has an unknown role")
    content, calls = message.get("content"), message.get("tool_calls") or message.get("function_call")
    parts = content if isinstance(content, list) else [content]
    try:
        if not all(isinstance(part, dict | str | None) for part in parts):
            raise ValueError("a part of the content is no object")
        if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
            message = {**message, "tool_calls": wire_calls(calls_in(message))}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unrecordable(f"message {at} has an unknown format") from error
    if not _is_text(message.get("tool_call_id")) or not _is_text(message.get("name")):
        raise Unrecordable(f"message {at} has a name or tool_call_id that is not a string")
    return message if role == message["role"] else {**message, "role": role}


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


def with_sampled_calls(call: ClientRequest, calls: SampledCalls) -> tuple[ClientRequest, int]:
    """The chat completion's request with its ``calls`` as they were sampled, and how many that changes."""
    messages = calls.put_back(call.messages)
    different = [(one, other) for one, other in zip(call.messages, messages, strict=True) if one is not other]
    if not different:
        return call, 0
    # The roles as they were sent: recorded messages have a system message for a developer's.
    sent = [
        {**given, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else given
        for given, message in zip(call.document["messages"], messages, strict=True)
    ]
    document = {**call.document, "messages": sent}
    changed = sum(
        a is not b for one, other in different for a, b in zip(one["tool_calls"], other["tool_calls"], strict=True)
    )
    return replace(call, body=dump_object(document), document=document, messages=messages), changed
