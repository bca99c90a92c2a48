"""Token ids as the text in which they came.

An answer to a prompt of 35,000 tokens is a quarter of a megabyte, nearly all of it prompt ids that the gateway knows
already. So the array is cut out before the answer is parsed, compared as text with what is known, and only what is new
becomes numbers. The canonical text of ids is ``b"17,4,256,"``: no spaces, a comma after each, so that the text of a
prompt that goes on begins with the text of the one before, and never ends inside a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic_core import from_json

_NAME = b'"prompt_token_ids"'
_ARRAY = re.compile(rb"\s*:\s*\[")
_PLACE = re.compile(rb'(?<!\\)"prompt_token_ids":(\d+)')
_SPACES = b" \t\r\n"
_LARGEST = 2**31


def cut(body: bytes) -> tuple[bytes, list[bytes]]:
    """``body`` with every array of prompt ids replaced by its number, and the texts of these arrays.

    Inside a JSON string a quote is escaped, so a name without backslashes before its quotes is a name.
    """
    parts: list[bytes] = []
    texts: list[bytes] = []
    done, at = 0, body.find(_NAME)
    while at >= 0:
        opened = _ARRAY.match(body, at + len(_NAME))
        if opened is not None and body[at - 1 : at] != b"\\" and (end := body.find(b"]", opened.end())) >= 0:
            parts += (body[done:at], _NAME, b":%d" % len(texts))
            texts.append(body[opened.end() : end])
            done = end + 1
        at = body.find(_NAME, max(at + 1, done))
    return (b"".join((*parts, body[done:])), texts) if texts else (body, texts)


def paste(body: bytes, texts: Sequence[bytes]) -> bytes:
    """The opposite of ``cut``, for a body that was written without spaces."""

    def array(place: re.Match[bytes]) -> bytes:
        number = int(place[1])
        return b"%s:[%s]" % (_NAME, texts[number]) if number < len(texts) else place[0]

    return _PLACE.sub(array, body)


def canonical(text: bytes) -> bytes:
    """The inside of a JSON array of numbers as canonical text."""
    if b" " in text or b"\n" in text:
        text = text.translate(None, _SPACES)
    return text + b"," if text else b""


def text_of(ids: Sequence[int]) -> bytes:
    """The canonical text of ids."""
    return canonical(str(list(ids))[1:-1].encode())


def ids_of(text: bytes) -> list[int] | None:
    """The ids that canonical text spells, or ``None`` when there is something else in it."""
    try:
        found = from_json(b"[%s]" % text[:-1])
    except ValueError:
        return None
    return found if are_ids(found) else None


def are_ids(found: object) -> bool:
    """Whether it is a list of token ids: whole numbers that fit 31 bits."""
    if not isinstance(found, list):
        return False
    return not found or (set(map(type, found)) == {int} and min(found) >= 0 and max(found) < _LARGEST)
