"""Token ids as the text in which they came.

They are compared as text with what is known, and only what is new becomes numbers. The canonical text of ids is
``b"17,4,256,"``: no spaces, a comma after each, so that the text of a prompt that goes on begins with the text of the
one before, and never ends inside a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic_core import from_json

from openhands_rl_plugin.core.types import Tokens

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
    """The ids that canonical text spells, or ``None`` when there is something else in it: they have up to 31 bits."""
    if text.translate(None, _DIGITS):
        return None
    try:
        ids: list[int] = from_json(b"[%s]" % text[:-1])
    except ValueError:
        return None
    return ids if max(ids, default=0) < _LARGEST else None


class PromptIdCache:
    """Turns arrays of prompt ids into numbers, of which those of an earlier prompt are the same objects.

    Nearly all of a prompt is that of the turn before, so that only what is new is read. ``most`` of them are
    remembered. May be used from several threads.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: tuple[tuple[bytes, tuple[int, ...]], ...] = ()

    def ids(self, inside: bytes) -> tuple[int, ...] | None:
        """The ids in the inside of an array, or ``None`` when there is something else in it."""
        known = self._known
        start, ids = max((each for each in known if _begins(inside, each[0])), key=_length, default=(b"", ()))
        # What is new begins with the comma behind the last known id.
        new = ids_of(canonical(inside[len(start) :])[bool(start) :])
        if new is None:
            return None
        ids += tuple(new)
        # Replaced as a whole, so that others never see it half done.
        self._known = ((inside, ids), *(each for each in known if each[0] is not start))[: self._most]
        return ids


class ContextCache:
    """Tokens of answers, of which only what a prompt adds to the context it goes on from is read.

    The contexts of the last ``most`` answers are remembered. May be used from several threads.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._prompts = PromptIdCache()
        self._known: tuple[tuple[Tokens, bytes, bytes], ...] = ()

    def tokens(
        self, inside: bytes, sampled: TokenIds, logprobs: Sequence[float], after: Tokens | None = None
    ) -> Tokens | None:
        """The tokens of an answer with the prompt's ids ``inside`` an array; ``None`` when something else is in it.

        ``after`` are the tokens of the answer before on the same path. If the prompt goes on from them, and they were
        made here, the tokens extend them.
        """
        added = self._added(inside, after)
        extends = added is not None
        prompt = ids_of(added) if added is not None else self._prompts.ids(inside)
        if prompt is None:
            return None
        # Nothing is validated again: the arrays hold nothing but numbers.
        tokens = Tokens.model_construct(
            extends=extends, prompt_ids=tuple(prompt), sampled_ids=tuple(sampled.numbers), logprobs=tuple(logprobs)
        )
        # Replaced as a whole, so that others never see it half done.
        self._known = ((tokens, inside, sampled.text), *self._known)[: self._most]
        return tokens

    def _added(self, inside: bytes, after: Tokens | None) -> bytes | None:
        """What a prompt adds to the context, as canonical text; ``None`` when it does not go on from it."""
        prompt, sampled = next((known[1:] for known in self._known if known[0] is after), (b"", b""))
        if not _begins(inside, prompt):
            return None
        rest = canonical(inside[len(prompt) :])[1:]
        return rest[len(sampled) :] if rest.startswith(sampled) else None


def _begins(inside: bytes, start: bytes) -> bool:
    """Whether an array begins with the ids of another one; not with a part of a number."""
    return bool(start) and inside.startswith(start) and inside[len(start) : len(start) + 1] in (b"", b",")


def _length(known: tuple[bytes, tuple[int, ...]]) -> int:
    return len(known[0])
