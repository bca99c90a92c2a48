"""The selection of a suite's tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from pydantic import Field

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.core.validation import unknown_name


class Selection(Frozen):
    """Ids or shell patterns of ids (empty: everything), then an order shuffled by a seed, then a limit."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shuffle: int | None = None
    limit: int | None = Field(default=None, ge=1)

    def of[T](self, items: Sequence[T], id_of: Callable[[T], str]) -> tuple[T, ...]:
        """The chosen items. Raises ``ConfigError`` for an id or pattern without a match."""
        ids = [id_of(item) for item in items]
        for wanted in self.include:
            if not any(fnmatchcase(each, wanted) for each in ids):
                pattern = any(letter in wanted for letter in "*?[")
                raise ConfigError(
                    f"no instance matches {wanted!r}" if pattern else unknown_name("instance", wanted, ids)
                )
        chosen = [
            item
            for item, each in zip(items, ids, strict=True)
            if (not self.include or _matches(each, self.include)) and not _matches(each, self.exclude)
        ]
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(chosen)
        return tuple(chosen[: self.limit])


def _matches(identity: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(identity, pattern) for pattern in patterns)
