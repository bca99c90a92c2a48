"""Fast parsing of untrusted JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from openhands_rl_plugin.core.messages import whole_json

Json = dict[str, Any]
"""A JSON object of unknown structure."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def parse_object(text: bytes) -> Json | None:
    """The object, or ``None`` when ``text`` is not a JSON object."""
    found = _read(text)
    return found if isinstance(found, dict) else None


def dump_object(value: Mapping[str, Any]) -> bytes:
    """``value`` on one line, without spaces."""
    return _ENCODER.encode(value).encode()


def _read(text: bytes) -> object:
    try:
        return from_json(text)
    except ValueError:
        pass
    try:
        return whole_json(json.loads(text))
    except (ValueError, RecursionError):
        return None
