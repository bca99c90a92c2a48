"""Cuts the arrays of token ids out of a response before it is parsed.

The response to a prompt of 35,000 tokens has a quarter of a megabyte, nearly all of it prompt ids that the gateway
already has. So the arrays stay text, and only their new part becomes numbers (``token_id_text.py``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import NamedTuple

PROMPT_IDS, SAMPLED_IDS = "prompt_token_ids", "token_ids"

# Replaces an array. It is random per process, so no client or server can forge it.
_MARK = f"@{secrets.token_hex(8)}:"
_PLACE = re.compile(rb'"%s(\d+)"' % _MARK.encode())
_OPENING = re.compile(rb"\s*:\s*\[")

Span = tuple[int, int]


class StrippedBody(NamedTuple):
    """A JSON text without its arrays of ids, and the text inside of each."""

    rest: bytes
    texts: tuple[bytes, ...] = ()

    def inside(self, value: object) -> bytes | None:
        """The inside of the array that the placeholder ``value`` replaced; ``None`` when it is no placeholder."""
        if not isinstance(value, str) or not value.startswith(_MARK):
            return None
        number = value.removeprefix(_MARK)
        return self.texts[int(number)] if number.isdecimal() and int(number) < len(self.texts) else None

    def paste(self, written: bytes) -> bytes:
        """Replace the placeholders in ``written``, JSON text of the document parsed from ``rest``, by their arrays."""
        return _PLACE.sub(lambda place: b"[%s]" % self.texts[int(place[1])], written) if self.texts else written


def strip_id_arrays(body: bytes) -> StrippedBody:
    """``body`` with a placeholder for every array of ids; ``rest`` is JSON if ``body`` is."""
    texts: list[bytes] = []
    # The longest arrays first, so that the second search is short.
    rest = _without(body, _numbers(body, PROMPT_IDS), texts)
    rest = _without(rest, _numbers(rest, SAMPLED_IDS), texts)
    return StrippedBody(rest, tuple(texts))


def _without(body: bytes, spans: Iterator[Span], texts: list[bytes]) -> bytes:
    """``body`` with placeholders for the arrays at ``spans``; their insides are appended to ``texts``."""
    parts: list[bytes] = []
    done = 0
    for start, end in spans:
        # The brackets are replaced, too.
        parts += (body[done : start - 1], b'"%s%d"' % (_MARK.encode(), len(texts)))
        texts.append(body[start:end])
        done = end + 1
    return b"".join((*parts, body[done:])) if parts else body


def _numbers(body: bytes, name: str) -> Iterator[Span]:
    """The insides of the arrays of that name that contain neither strings nor arrays."""
    quoted = b'"%s"' % name.encode()
    at, end = _behind(quoted, body, 0), 0
    while at >= 0:
        if (opened := _OPENING.match(body, at)) is not None:
            start = opened.end()
            end = end if end > start else body.find(b"]", start)
            if end < 0:
                return
            if body.find(b'"', start, end) < 0 and body.find(b"[", start, end) < 0:
                yield start, end
                at = end
        at = _behind(quoted, body, at)


def _behind(name: bytes, body: bytes, at: int) -> int:
    """Where the next ``name`` ends, or -1. With a backslash before its quote it is part of a string."""
    found = body.find(name, at)
    while found > 0 and body[found - 1 : found] == b"\\":
        found = body.find(name, found + 1)
    return found + len(name) if found >= 0 else -1
