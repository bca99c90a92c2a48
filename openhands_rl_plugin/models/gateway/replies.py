"""Responses to clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from openhands_rl_plugin.models.gateway.json_text import dump_object

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response. ``recorded``: its content is stored, so a retry may get the same reply."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


def error_reply(status: int, message: str, kind: str, headers: Mapping[str, str] | None = None) -> Reply:
    """An error of the gateway itself, in a format that clients of OpenAI and of Anthropic read."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Reply(status=status, body=dump_object({"type": "error", "error": error}), headers=headers or {})
