"""Token ids and JSON in the bytes of a response, cut out, compared and parsed without an object for each number.

The response to a prompt of 35,000 tokens has a quarter of a megabyte, nearly all of it prompt ids that the gateway
already has. So the arrays stay text, which is compared with that of earlier prompts, and only the new part is parsed.
The canonical text of ids is ``b"17,4,256,"``: no spaces, a comma after each, so that the text of an extended prompt
starts with the text of the earlier one, and a prefix never ends inside a number.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json

from openhands_rl_plugin.core.messages import whole_json
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Tokens

Json = dict[str, Any]
"""A JSON object of unknown structure."""

DEEPEST = 100
"""Levels of nesting. Pydantic reads 200 from a store, and what is recorded is wrapped in some more."""

_HOLDERS = frozenset({dict, list})
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def parse_object(text: bytes) -> Json | None:
    """The object, or ``None`` when ``text`` is not a JSON object, or one of more than ``DEEPEST`` levels."""
    found = _read(text)
    return found if isinstance(found, dict) and not too_deep(found) else None


def too_deep(value: object) -> bool:
    """Whether a JSON value has more than ``DEEPEST`` levels of arrays and objects."""
    holders: list[Any] = [value] if type(value) in _HOLDERS else []
    for _ in range(DEEPEST):
        holders = [
            each for one in holders for each in (one.values() if type(one) is dict else one) if type(each) in _HOLDERS
        ]
        if not holders:
            return False
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


_SPACES = b" \t\r\n"
_DIGITS = b"0123456789,"
_LARGEST = 2**31


class TokenIds(NamedTuple):
    """Token ids as canonical text and as numbers."""

    text: bytes
    numbers: list[int]


def canonical(text: bytes) -> bytes:
    """The inside of a JSON array of numbers as canonical text."""
    if b" " in text or b"\n" in text:
        text = text.translate(None, _SPACES)
    return text + b"," if text else b""


def text_of(ids: Sequence[int]) -> bytes:
    """The canonical text of ids."""
    return canonical(str(list(ids))[1:-1].encode())


def ids_of(text: bytes) -> list[int] | None:
    """The ids in canonical text, or ``None`` when it contains anything but ids of up to 31 bits."""
    if text.translate(None, _DIGITS):
        return None
    try:
        ids: list[int] = from_json(b"[%s]" % text[:-1])
    except ValueError:
        return None
    return ids if max(ids, default=0) < _LARGEST else None


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """The canonical text of a sampled node's prompt delta and sampled ids; ``extends`` as in ``Tokens``."""

    extends: bool
    text: bytes


class NodeTokens:
    """Token ids by node, as text: about seven bytes per token, each token once.

    A gateway's tree drops the ids of a node once they are stored, and has them here only.
    """

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree
        self._pieces: dict[int, TokenSegment] = {}

    def forget(self, nodes: Sequence[int]) -> None:
        """Keep the ids of these nodes as text alone."""
        for index in nodes:
            self._piece(index)
            self._tree.nodes[index].tokens = None

    def read(self, parent: int | None, prompt: bytes, sampled: TokenIds, logprobs: Sequence[float]) -> Tokens | None:
        """The tokens of an answer to ``prompt`` (canonical text) below ``parent``.

        They extend those before when the prompt starts with them; ``None`` when it contains anything but token ids.
        """
        chain = self._chain(parent)
        at = 0
        for piece in chain:
            if not prompt.startswith(piece.text, at):
                chain, at = [], 0
                break
            at += len(piece.text)
        ids = ids_of(prompt[at:])
        if ids is None:
            return None
        # No second validation: the arrays contain only numbers.
        return Tokens.model_construct(
            extends=bool(chain), prompt_ids=tuple(ids), sampled_ids=tuple(sampled.numbers), logprobs=tuple(logprobs)
        )

    def _chain(self, node: int | None) -> list[TokenSegment]:
        """The segments of the nearest sampled node at or above ``node``, from the start of its segment."""
        chain: list[TokenSegment] = []
        while node is not None:
            piece = self._piece(node)
            if piece is not None:
                chain.append(piece)
                if not piece.extends:
                    break
            node = self._tree.nodes[node].parent
        return chain[::-1]

    def _piece(self, node: int) -> TokenSegment | None:
        tokens = self._tree.nodes[node].tokens
        if node not in self._pieces and tokens is not None:
            text = text_of(tokens.prompt_ids) + text_of(tokens.sampled_ids)
            self._pieces[node] = TokenSegment(tokens.extends, text)
        return self._pieces.get(node)
