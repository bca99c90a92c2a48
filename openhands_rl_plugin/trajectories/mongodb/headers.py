"""The small document of each episode, and filters in MongoDB's query language."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from openhands_rl_plugin.core.records import SEARCHED, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.trajectories.storages.header import EpisodeHeader

Query = dict[str, Any]

COMPUTED_ORDERS: dict[TrajectoryOrder, Query] = {
    TrajectoryOrder.TOKENS: {"$add": ["$prompt_tokens", "$completion_tokens"]},
    TrajectoryOrder.SECONDS: {"$subtract": ["$finished", "$started"]},
}
"""Sort keys that are computed."""
_COLUMNS = tuple(name for name in EpisodeHeader._fields if name != "id")
_DIRECTIONS = {False: 1, True: -1}


class StoredEpisode(NamedTuple):
    """An episode as the ``episodes`` collection has it.

    The first ``chunks`` documents of the log ``generation`` are valid. ``scored`` is the number of the newest score,
    0 when there is none; ``score`` is the reward of the newest judgement of the outcome, if any.
    """

    header: EpisodeHeader
    generation: str
    chunks: int
    open: bool
    scored: int
    score: float | None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """From the database."""
        header = EpisodeHeader(id=document["_id"], **{name: document[name] for name in _COLUMNS})
        return cls(header, *(document[name] for name in cls._fields[1:]))

    def summary(self) -> TrajectorySummary:
        """The summary for lists."""
        return self.header.summary(self.score)


def new_document(header: EpisodeHeader, *, order: int, generation: str, chunks: int, is_open: bool) -> dict[str, Any]:
    """An episode without a score. ``order`` counts the episodes as they are stored."""
    row = {"_id": header.id, "order": order, "generation": generation, "chunks": chunks, "open": is_open}
    return {**row, **_columns(header), "scored": 0, "score": None, **_reward(header.sorting_reward(None))}


def change_to(header: EpisodeHeader, *, generation: str, chunks: int, is_open: bool) -> list[Query]:
    """The update that makes an episode this one; a judgement that it has still decides what it is found by.

    A failed episode is found by no reward.
    """
    row = {"generation": generation, "chunks": chunks, "open": is_open, **_columns(header)}
    # In a pipeline a text that begins with a dollar sign would be a field otherwise.
    literal = {name: {"$literal": value} for name, value in row.items()}
    decides = header.failed or {"$eq": ["$score", None]}
    kept = {
        name: {"$cond": [decides, {"$literal": value}, f"${name}"]}
        for name, value in _reward(header.sorting_reward(None)).items()
    }
    return [{"$set": {**literal, **kept}}]


def score_change(number: int, reward: float | None, episode_return: float | None) -> list[Query]:
    """The update after the score ``number``: the newest judgement is now ``reward``, and what the episode is found by
    unless it failed; ``None``: there is no judgement, and it is found by its return."""
    valid = {"$eq": ["$failure_kind", None]}
    found_by = _reward(episode_return if reward is None else reward)
    kept = {name: {"$cond": [valid, {"$literal": value}, f"${name}"]} for name, value in found_by.items()}
    return [{"$set": {"scored": {"$literal": number}, "score": {"$literal": reward}, **kept}}]


def query_of(where: TrajectoryFilter) -> Query:
    """The query of a filter, without ``offset`` and ``limit``."""
    equal = {name: getattr(where, name) for name in _EQUAL if getattr(where, name) is not None}
    query: Query = {name: str(value) if isinstance(value, str) else value for name, value in equal.items()}
    if where.ids is not None:
        query["_id"] = {"$in": list(where.ids)}
    if where.finished is not None:
        query["open"] = not where.finished
    if where.failed is not None:
        # Combined with the filter's own kind.
        query["$and"] = [{"failure_kind": {"$ne": None} if where.failed else None}]
    if reward := _bounds(where.reward_at_least, where.reward_at_most):
        # The index begins with whether the reward is known.
        query |= {"unrewarded": False, "reward": reward}
    if finished := _bounds(where.since, where.until):
        query["finished"] = finished
    if where.contains is not None:
        # The server takes no NUL in a pattern.
        pattern = re.escape(where.contains).replace("\0", r"\x00")
        query["$or"] = [{"_id" if name == "id" else name: {"$regex": pattern}} for name in SEARCHED]
    return query


def summed(document: Mapping[str, Any], order: TrajectoryOrder) -> float:
    """A computed sort key of a document."""
    if order is TrajectoryOrder.TOKENS:
        return document["prompt_tokens"] + document["completion_tokens"]
    return document["finished"] - document["started"]


def order_of(where: TrajectoryFilter) -> list[tuple[str, int]]:
    """The sort keys."""
    direction = _DIRECTIONS[where.descending]
    if where.sort is TrajectoryOrder.STORED:
        return [("order", direction)]
    first = [("unrewarded", 1)] if where.sort is TrajectoryOrder.REWARD else []
    return [*first, (where.sort.value, direction), ("order", 1)]


def asks_for_reward(where: TrajectoryFilter) -> bool:
    """Whether the matches or their order depend on scores."""
    bounded = not (where.reward_at_least is None and where.reward_at_most is None)
    return where.sort is TrajectoryOrder.REWARD or bounded


_EQUAL = (
    "run_id",
    "group_id",
    "task_id",
    "environment",
    "split",
    "strategy",
    "adapter",
    "policy_version",
    "stop",
    "failure_kind",
)


def _columns(header: EpisodeHeader) -> dict[str, Any]:
    return {name: getattr(header, name) for name in _COLUMNS}


def _reward(value: float | None) -> dict[str, Any]:
    """The reward of filters and sorting. A NaN counts as unknown."""
    known = None if value is None or math.isnan(value) else value
    return {"reward": known, "unrewarded": known is None}


def _bounds(least: float | None, most: float | None) -> dict[str, float]:
    return {sign: value for sign, value in (("$gte", least), ("$lte", most)) if value is not None}
