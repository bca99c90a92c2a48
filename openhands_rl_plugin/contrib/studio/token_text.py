"""Token ids as pieces of text, where there is a tokenizer that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, MissingExtraError, boundary
from openhands_rl_plugin.core.types import FailureKind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BEFORE = 8
"""Tokens that are decoded before a page, so that its first piece has the space that it has inside of a text."""


class TokenText:
    """Pieces of text for token ids. ``problem``: why there are none, for the page; ``None`` when there are."""

    def __init__(self, folder: str = "") -> None:
        self.problem: str | None = "no tokenizer is open; start the studio with --tokenizer DIR"
        self._tokenizer: Tokenizer | None = None
        if folder:
            self._tokenizer = load_tokenizer(Path(folder).expanduser())
            self.problem = None

    def pieces(self, ids: Sequence[int], first: int, end: int) -> list[str | None]:
        """The text of each of ``ids[first:end]``; a character of several tokens stands at its last one. ``None`` where
        the tokenizer does not know the id, or there is none."""
        if self._tokenizer is None:
            return [None] * (end - first)
        from tokenizers.decoders import DecodeStream

        size, found = self._tokenizer.get_vocab_size(with_added_tokens=True), list[str | None]()
        stream = DecodeStream(skip_special_tokens=False)
        for at in range(max(0, first - _BEFORE), end):
            known = 0 <= ids[at] < size
            piece = (stream.step(self._tokenizer, ids[at]) or "") if known else None
            if at >= first:
                found.append(piece)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """All of the text, special tokens included; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Of a folder's ``tokenizer.json``, or of that file. Raises ``ConfigError`` and ``MissingExtraError``."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingExtraError("tokenizers", "train") from error
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(f"--tokenizer: there is no {file}; give the folder of a model that has a tokenizer.json")
    try:
        with boundary(FailureKind.MODEL, "tokenizer"):
            return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except CaughtFailure as error:
        raise ConfigError(f"--tokenizer: {file} cannot be read: {error.failure.message}") from error
