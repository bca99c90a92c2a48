"""Fast parsing of untrusted JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from openhands_rl_plugin.core.messages import whole_json

Json = dict[str, Any]
"""A JSON object of unknown structure."""

DEEPEST = 100
"""Levels of nesting. Pydantic reads 200 from a store, and what is recorded is wrapped in some more."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def parse_object(text: bytes) -> Json | None:
    """The object, or ``None`` when ``text`` is not a JSON object, or one of more than ``DEEPEST`` levels."""
    found = _read(text)
    return found if isinstance(found, dict) and not too_deep(found) else None


def too_deep(value: object) -> bool:
    """Whether a JSON value has more than ``DEEPEST`` levels of arrays and objects."""
    level = [value]
    for _ in range(DEEPEST + 1):
        holders = [each for each in level if isinstance(each, dict | list)]
        if not holders:
            return False
        level = [each for one in holders for each in (one.values() if isinstance(one, dict) else one)]
    return True


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
