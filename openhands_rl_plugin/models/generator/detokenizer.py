"""Text of a growing answer: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class Detokenizer:
    """Turns sampled token ids into text as they come and finds stop strings.

    ``text`` is what may be shown. Until ``finish``, an end that might grow into a stop string is withheld from it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._whole = ""
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> bool:
        """Take one more token; True when a stop string is complete (it and what follows are cut)."""
        piece = self._stream.step(self._backend, token)
        if not piece:
            return False
        searched = max(0, len(self._whole) - max((len(s) for s in self._stop), default=0))
        self._whole += piece
        hits = [(at, s) for s in self._stop if (at := self._whole.find(s, searched)) >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self._whole[:at]
            return True
        self.text = self._whole[: len(self._whole) - self._withheld()]
        return False

    def finish(self, whole: str) -> None:
        """Settle on the final text; ``whole`` is all tokens decoded at once (unfinished characters included)."""
        if self.stopped_by is None:
            self.text = whole

    def _withheld(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            tail = self._whole[max(0, len(self._whole) - len(stop) + 1) :]
            at = tail.find(stop[0])
            while at >= 0 and not stop.startswith(tail[at:]):
                at = tail.find(stop[0], at + 1)
            longest = max(longest, len(tail) - at if at >= 0 else 0)
        return longest
