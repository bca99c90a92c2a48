"""The session that a request belongs to.

The first of these that is present is its name:

1. the path: ``/session/<name>/v1/chat/completions``, set by the user as the ``base_url``;
2. the header ``x-litellm-session-id``, which OpenHands' SDK sends with every request of a conversation, or
   ``x-claude-code-session-id``;
3. ``prompt_cache_key`` in the body, which Codex and older SDKs send;
4. ``session_id`` in the body's ``metadata`` or ``litellm_metadata``, or in their ``user_id``, where Claude Code has it,
   or ``litellm_session_id`` beside them;
5. a digest of the client's address and user agent, and of all messages up to the first user message.

By the last rule, conversations with the same first messages share a session and are branches of one tree. It is all
that is left for OpenHands' SDK before 1.18.1, which sends no id. From then on it sends the id of the conversation as
``prompt_cache_key``, and from 1.30 also in the header, which alone arrives with models ``litellm_proxy/...`` of 1.58.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from openhands_rl_plugin.core.messages import WireMessage, text_of
from openhands_rl_plugin.models.gateway.json_text import Json, parse_object

HEADERS = ("x-litellm-session-id", "x-claude-code-session-id")
_IN_USER_ID = "_session_"
LONGEST = 200
OPENING = "opening"


class SessionName(NamedTuple):
    """The name of a session, and which of the rules gave it."""

    name: str
    named_by: Literal["path", "header", "prompt_cache_key", "metadata", "opening", "response"]


def session_name(
    path_name: str, client: str, headers: Mapping[str, str], document: Json, messages: Sequence[WireMessage]
) -> SessionName:
    """The name of the session. ``path_name``: from the path, or empty; ``client``: the client's address."""
    if name := named_session(path_name, headers):
        return SessionName(name, "path" if _name(path_name) else "header")
    if name := _name(document.get("prompt_cache_key")):
        return SessionName(name, "prompt_cache_key")
    if name := _from_metadata(document):
        return SessionName(name, "metadata")
    return SessionName(_from_opening(client, headers, messages), OPENING)


def named_session(path_name: str, headers: Mapping[str, str]) -> str:
    """The name in the path or in a header; empty without one."""
    return _name(path_name) or next(filter(None, (_name(headers.get(name)) for name in HEADERS)), "")


def _name(given: Any) -> str:
    """A printable name; one longer than ``LONGEST`` is replaced by its digest."""
    if not isinstance(given, str) or not given.strip():
        return ""
    name = "".join(each if each.isprintable() else "?" for each in given.strip())
    return name if len(name) <= LONGEST else hashlib.sha256(name.encode()).hexdigest()


def _from_metadata(document: Json) -> str:
    for place in ("metadata", "litellm_metadata"):
        metadata = document.get(place)
        metadata = metadata if isinstance(metadata, dict) else {}
        if name := _name(metadata.get("session_id")) or _from_user(metadata.get("user_id")):
            return name
    return _name(document.get("litellm_session_id"))


def _from_user(user: Any) -> str:
    """The session in Claude Code's ``user_id``: ``user_<id>_account_<id>_session_<id>``, or an object with its id."""
    if not isinstance(user, str):
        return ""
    told = parse_object(user.encode("utf-8", "replace"))
    return _name(told.get("session_id") if told is not None else user.partition(_IN_USER_ID)[2])


def _from_opening(client: str, headers: Mapping[str, str], messages: Sequence[WireMessage]) -> str:
    digest = hashlib.sha256(f"{client}\0{headers.get('user-agent', '')}".encode())
    for message in messages:
        digest.update(f"\0{message['role']}\0{text_of(message.get('content')) or ''}".encode("utf-8", "replace"))
        if message["role"] == "user":
            break
    return f"opening-{digest.hexdigest()[:24]}"
