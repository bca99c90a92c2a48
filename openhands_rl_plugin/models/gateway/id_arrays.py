"""The arrays of token ids in an answer as the text in which they came.

An answer to a prompt of 35,000 tokens is a quarter of a megabyte, nearly all of it prompt ids that the gateway knows
already. So the arrays are cut out before the answer is parsed, and only what is new in them becomes numbers
(``idtext``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import NamedTuple

PROMPT_IDS, SAMPLED_IDS = "prompt_token_ids", "token_ids"

# Stands where an array was. Nobody else can write it, because every process has its own.
_MARK = f"@{secrets.token_hex(8)}:"
_PLACE = re.compile(rb'"%s(\d+)"' % _MARK.encode())
_OPENING = re.compile(rb"\s*:\s*\[")

Span = tuple[int, int]


class StrippedBody(NamedTuple):
    """A JSON text without its arrays of ids, and the text inside of each."""

    rest: bytes
    texts: tuple[bytes, ...] = ()

    def inside(self, value: object) -> bytes | None:
        """What stood in the array in whose place ``value`` was read; ``None`` when it is anything else."""
        if not isinstance(value, str) or not value.startswith(_MARK):
            return None
        number = value.removeprefix(_MARK)
        return self.texts[int(number)] if number.isdecimal() and int(number) < len(self.texts) else None

    def paste(self, written: bytes) -> bytes:
        """Put the arrays back into what was written of the document that was read of ``rest``."""
        return _PLACE.sub(lambda place: b"[%s]" % self.texts[int(place[1])], written) if self.texts else written


def strip_id_arrays(body: bytes) -> StrippedBody:
    """``body`` with a mark in the place of every array of ids; ``rest`` is JSON if ``body`` is."""
    texts: list[bytes] = []
    # The longest ones first, so that the others need not be looked for in them.
    rest = _without(body, _numbers(body, PROMPT_IDS), texts)
    rest = _without(rest, _numbers(rest, SAMPLED_IDS), texts)
    return StrippedBody(rest, tuple(texts))


def _without(body: bytes, spans: Iterator[Span], texts: list[bytes]) -> bytes:
    """``body`` with the arrays marked whose insides ``spans`` are; these are added to ``texts``."""
    parts: list[bytes] = []
    done = 0
    for start, end in spans:
        # The brackets go, too.
        parts += (body[done : start - 1], b'"%s%d"' % (_MARK.encode(), len(texts)))
        texts.append(body[start:end])
        done = end + 1
    return b"".join((*parts, body[done:])) if parts else body


def _numbers(body: bytes, name: str) -> Iterator[Span]:
    """The insides of the arrays of that name that hold neither texts nor arrays."""
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
    """Where the next ``name`` ends, or -1. With a backslash before its quote it is a part of a text."""
    found = body.find(name, at)
    while found > 0 and body[found - 1 : found] == b"\\":
        found = body.find(name, found + 1)
    return found + len(name) if found >= 0 else -1
