"""Drafts: the next tokens of an answer, guessed from text that was seen before, for the model to check all at once.

Agents say much of what they say again: the form of a call, the name of a file, lines of code that they were shown. A
step that checks several guessed tokens costs little more than one that computes a single one. Each token is still drawn
from the model's own distribution with the sequence's own random numbers, and a guess counts where it is the token that
was drawn: what comes out does not depend on the guesses, which is speculative decoding (Leviathan et al. 2023, arXiv
2211.17192) with drafts by n-grams ("prompt lookup", as vLLM's method "ngram"). As with other sizes of a batch, numbers
are rounded otherwise in steps of other sizes, so that logprobs differ in their last digits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_SHARED_GRAM = 4
_SHARED_ENTRIES = 1 << 16
_AGREED = 2
"""How often in a row the same token followed, before it is guessed in another sequence: of a form every token did."""
_OWN_GRAM = 3
_OWN_TOKENS = 1 << 13
"""How far back a sequence is searched, which bounds the memory of its index: 2 MB."""
_FIRST_REACH = 4


class SharedForms:
    """What followed each four tokens of the latest answers, whoever gave them. Not thread-safe."""

    def __init__(self) -> None:
        self._following: OrderedDict[tuple[int, ...], tuple[int, int]] = OrderedDict()

    def learn(self, ids: Sequence[int]) -> None:
        """Take the last token of ``ids`` as what follows those before it."""
        if len(ids) <= _SHARED_GRAM:
            return
        gram, token = tuple(ids[-_SHARED_GRAM - 1 : -1]), ids[-1]
        known, times = self._following.get(gram, (token, 0))
        self._following[gram] = (token, min(times + 1, _AGREED) if known == token else 1)
        self._following.move_to_end(gram)
        if len(self._following) > _SHARED_ENTRIES:
            self._following.popitem(last=False)

    def following(self, ids: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that would follow ``ids``."""
        gram, found = tuple(ids[-_SHARED_GRAM:]), list[int]()
        while len(found) < most:
            token, times = self._following.get(gram, (0, 0))
            if times < _AGREED:
                break
            found.append(token)
            gram = (*gram[1:], token)
        return found


class Draft:
    """The guesses of one sequence: first from ``SharedForms``, else what followed its last three tokens before, in the
    prompt or the answer. It guesses further ahead while all guesses are right, and less where they are not."""

    def __init__(self, forms: SharedForms, most: int) -> None:
        """``most``: tokens that are guessed at once; 0: none."""
        self._forms = forms
        self._most = most
        self._reach = min(_FIRST_REACH, most)
        self._places: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def following(self, ids: Sequence[int], most: int) -> list[int]:
        """Guesses of what follows ``ids``, the sequence so far; at most ``most`` (0 or less: none)."""
        most = min(most, self._reach)
        if most <= 0:
            return []
        return self._forms.following(ids, most) or self._own(ids, most)

    def _own(self, ids: Sequence[int], most: int) -> list[int]:
        for end in range(max(self._indexed, _OWN_GRAM, len(ids) - _OWN_TOKENS), len(ids)):
            self._places[tuple(ids[end - _OWN_GRAM : end])] = end
        self._indexed = len(ids)
        place = self._places.get(tuple(ids[-_OWN_GRAM:]))
        return [] if place is None else list(ids[place : place + most])

    def checked(self, guessed: int, right: int) -> None:
        """Of ``guessed`` tokens the first ``right`` were what the model said."""
        if not guessed:
            # Nothing to guess from: where there is again, it may be another kind of text.
            self._reach = min(self._reach + 1, self._most)
        elif right == guessed:
            self._reach = min(2 * self._reach, self._most)
        elif self._most:
            self._reach = max(right, 1)

    def learn(self, ids: Sequence[int]) -> None:
        """Take the last token of ``ids``, one that was sampled, as what follows those before it."""
        if self._most:
            self._forms.learn(ids)
