"""Token ids as the JSON text in which they were received.

The text is compared with that of earlier prompts, and only the new part is parsed. The canonical text of ids is
``b"17,4,256,"``: no spaces, a comma after each, so that the text of an extended prompt starts with the text of the
earlier one, and a prefix never ends inside a number.
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
    """The ids in canonical text, or ``None`` when it contains anything but ids of up to 31 bits."""
    if text.translate(None, _DIGITS):
        return None
    try:
        ids: list[int] = from_json(b"[%s]" % text[:-1])
    except ValueError:
        return None
    return ids if max(ids, default=0) < _LARGEST else None


class PromptIdCache:
    """Parses arrays of prompt ids and reuses the parsed ids of earlier prompts.

    Most of a prompt repeats that of the turn before, so only the new part is parsed. ``most`` prompts are kept.
    Thread-safe.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: tuple[tuple[bytes, tuple[int, ...]], ...] = ()

    def ids(self, inside: bytes) -> tuple[int, ...] | None:
        """The ids in the inside of an array, or ``None`` when it contains anything else."""
        known = self._known
        start, ids = max((each for each in known if _begins(inside, each[0])), key=_length, default=(b"", ()))
        # The new part starts with the comma after the last known id.
        new = ids_of(canonical(inside[len(start) :])[bool(start) :])
        if new is None:
            return None
        ids += tuple(new)
        # Replaced in one assignment, so that other threads never see a partial state.
        self._known = ((inside, ids), *(each for each in known if each[0] is not start))[: self._most]
        return ids


class ContextCache:
    """Parses the tokens of answers; only the part that a prompt adds to an earlier context is parsed.

    The contexts of the last ``most`` answers are kept. Thread-safe.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._prompts = PromptIdCache()
        self._known: tuple[tuple[Tokens, bytes, bytes], ...] = ()

    def tokens(
        self, inside: bytes, sampled: TokenIds, logprobs: Sequence[float], after: Tokens | None = None
    ) -> Tokens | None:
        """The tokens of an answer to the prompt with the ids ``inside``; ``None`` when that contains anything else.

        ``after``: the tokens of the previous answer on the same path. The result extends them when the prompt starts
        with them and this cache still has them.
        """
        added = self._added(inside, after)
        extends = added is not None
        prompt = ids_of(added) if added is not None else self._prompts.ids(inside)
        if prompt is None:
            return None
        # No second validation: the arrays contain only numbers.
        tokens = Tokens.model_construct(
            extends=extends, prompt_ids=tuple(prompt), sampled_ids=tuple(sampled.numbers), logprobs=tuple(logprobs)
        )
        # Replaced in one assignment, so that other threads never see a partial state.
        self._known = ((tokens, inside, sampled.text), *self._known)[: self._most]
        return tokens

    def _added(self, inside: bytes, after: Tokens | None) -> bytes | None:
        """The canonical text that a prompt adds to the context; ``None`` when it does not start with it."""
        prompt, sampled = next((known[1:] for known in self._known if known[0] is after), (b"", b""))
        if not _begins(inside, prompt):
            return None
        rest = canonical(inside[len(prompt) :])[1:]
        return rest[len(sampled) :] if rest.startswith(sampled) else None


def _begins(inside: bytes, start: bytes) -> bool:
    """Whether an array starts with the ids of another one, and not with a part of a number."""
    return bool(start) and inside.startswith(start) and inside[len(start) : len(start) + 1] in (b"", b",")


def _length(known: tuple[bytes, tuple[int, ...]]) -> int:
    return len(known[0])
