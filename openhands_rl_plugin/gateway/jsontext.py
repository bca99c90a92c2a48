"""JSON as it comes over the wire: read fast, and without trusting that it is well formed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

Json = dict[str, Any]
"""A JSON object of somebody else, of unknown shape."""


def read_object(text: bytes) -> Json | None:
    """The object, or ``None`` when ``text`` is no JSON object."""
    found = _read(text)
    return found if isinstance(found, dict) else None


def write(value: Mapping[str, Any]) -> bytes:
    """``value`` on one line, without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def _read(text: bytes) -> object:
    try:
        return from_json(text)
    except ValueError:
        pass
    # Half surrogate pairs are valid JSON, but no text: each becomes a question mark.
    try:
        return from_json(json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
