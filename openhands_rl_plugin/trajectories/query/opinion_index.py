"""What people labelled and what verifiers think of all episodes of a store, in memory: reading scores is slow, and a
list that is looked at asks again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from openhands_rl_plugin.core.browsing.listing import Browsable
from openhands_rl_plugin.core.judgements import opinions_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter

Opinions = Mapping[str, Mapping[str, float]]
"""Episode -> column of ``OPINIONS`` -> what is said there."""

_FEW = 500


@dataclass
class _Known:
    cursor: str | None = None
    said: dict[str, dict[str, float]] = field(default_factory=dict)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


_known: WeakKeyDictionary[TrajectoryStorage, _Known] = WeakKeyDictionary()


async def opinions_among(storage: TrajectoryStorage, where: TrajectoryFilter) -> Opinions:
    """The opinions of at least the episodes that ``where`` finds. Raises ``StorageError``."""
    if not isinstance(storage, Browsable) or await storage.count(where) <= _FEW:
        return await opinions_of(storage, [each.id async for each in storage.summaries(where)])
    known = _known.setdefault(storage, _Known())
    async with known.reading:
        changes = await storage.changed_since(known.cursor)
        if known.cursor is None or changes.more:
            ids = [each.id async for each in storage.summaries(TrajectoryFilter(finished=None))]
            known.said = await opinions_of(storage, ids)
        elif news := {*changes.scored, *changes.began, *changes.ended}:  # a score may come before its episode
            anew = await opinions_of(storage, sorted(news))
            known.said = {each: told for each, told in known.said.items() if each not in news} | anew
        known.cursor = changes.cursor
        return known.said
