"""Filters, orders and pages in SQL. Equal ones are in the order in which they were stored, in both directions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from openhands_rl_plugin.core.records import SEARCHED, TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.trajectories.storages.packing import page_lost

# Written out, because an index that leaves out unfinished episodes is only used for a query that says so, too.
FINISHED = f"stop <> '{StopReason.UNFINISHED.value}'"
UNFINISHED = f"stop = '{StopReason.UNFINISHED.value}'"

NO_RETURN = "none"
"""The return's column where there is none; NULL is not allowed there."""

Condition = tuple[str, list[object]]
"""SQL and the values of its parameters."""

TOKENS, SECONDS = "(prompt_tokens + completion_tokens)", "(finished - started)"


def condition_of(where: TrajectoryFilter) -> Condition:
    """A filter."""
    compared = (
        ("run_id =", where.run_id),
        ("group_id =", where.group_id),
        ("task_id =", where.task_id),
        ("environment =", where.environment),
        ("split =", where.split),
        ("strategy =", where.strategy),
        ("adapter =", where.adapter),
        ("policy_version =", where.policy_version),
        ("stop =", where.stop),
        ("failure_kind =", where.failure_kind),
        ("reward >=", where.reward_at_least),
        ("reward <=", where.reward_at_most),
        ("finished >=", where.since),
        ("finished <=", where.until),
    )
    terms = [f"{term} ?" for term, value in compared if value is not None]
    values: list[object] = [value for _, value in compared if value is not None]
    if where.finished is not None:
        terms.append(FINISHED if where.finished else UNFINISHED)
    if where.failed is not None:
        terms.append(f"failure_kind IS {'NOT ' if where.failed else ''}NULL")
    if where.ids is not None:
        terms.append("id IN (SELECT value FROM json_each(?))")
        values.append(one_value(where.ids))
    if where.contains is not None:
        terms.append(f"({' OR '.join(f'instr({name}, ?)' for name in SEARCHED)})")
        values += [where.contains] * len(SEARCHED)
    return " AND ".join(terms) or "TRUE", values


def one_value(ids: Sequence[str]) -> str:
    """For ``json_each``, because a query may have only so many values. There a NUL ends a text, and no id has one."""
    return json.dumps([each for each in ids if "\0" not in each])


INDICES = f"""
CREATE INDEX IF NOT EXISTS episodes_by_reward ON episodes (reward DESC) WHERE {FINISHED};
CREATE INDEX IF NOT EXISTS episodes_by_tokens ON episodes ({TOKENS} DESC) WHERE {FINISHED};
DROP INDEX IF EXISTS episodes_reward;
"""
"""What orders of all episodes are read from. Downwards, so that equal ones come as they were stored; an open episode
changes with every turn, and is sorted when it is asked for. Earlier releases had the reward upwards."""

_KEYS = {
    TrajectoryOrder.FINISHED: "finished",
    TrajectoryOrder.REWARD: "reward",
    TrajectoryOrder.TURNS: "turns",
    TrajectoryOrder.TOKENS: TOKENS,
    TrajectoryOrder.SECONDS: SECONDS,
}


def order_of(where: TrajectoryFilter) -> str:
    """What to sort by."""
    direction = "DESC" if where.descending else "ASC"
    if where.sort is TrajectoryOrder.STORED:
        return f"row {direction}"
    # Downwards what is unknown comes last by itself.
    return f"{_KEYS[where.sort]} {direction}{'' if where.descending else ' NULLS LAST'}, row"


def after_of(connection: sqlite3.Connection, where: TrajectoryFilter) -> list[Condition]:
    """What comes after an episode in that order, in parts that exclude each other. Raises ``StorageError`` when that
    one is gone."""
    if where.after is None:
        return [("TRUE", [])]
    key = _KEYS.get(where.sort, "row")
    found = connection.execute(f"SELECT row, {key} FROM episodes WHERE id = ?", (where.after,)).fetchone()
    if found is None:
        raise page_lost(where.after)
    row, value = found
    sign = "<" if where.descending else ">"
    if where.sort is TrajectoryOrder.STORED:
        return [(f"row {sign} ?", [row])]
    if value is None:
        return [(f"({key} IS NULL AND row > ?)", [row])]
    # The first comparison is what an index finds.
    known = (f"({key} {sign}= ? AND ({key} {sign} ? OR row > ?))", [value, value, row])
    return [known, (f"{key} IS NULL", [])] if where.sort is TrajectoryOrder.REWARD else [known]


def is_of_all(where: TrajectoryFilter, condition: str) -> bool:
    """Whether all episodes, or all that have ended, are asked for in an order that an index may have."""
    return where.sort is not TrajectoryOrder.STORED and condition in ("TRUE", FINISHED)


def query_of_all(where: TrajectoryFilter, after: Sequence[Condition], total: int) -> Condition:
    """``row_numbers`` for ``is_of_all``, merged from what an index has and from the open episodes.

    ``total``: how many there are. The second half of an order is read from its end; the rows then come in reverse,
    which ``is_reversed`` tells.
    """
    key, values = _KEYS[where.sort], list[object]()
    parts = (FINISHED, UNFINISHED) if where.finished is None else (FINISHED,)
    arms: list[str] = []
    for part in parts:
        for condition, more in after:
            arms.append(f"SELECT row, {key} FROM episodes WHERE {part} AND {condition}")
            values += more
    limit, offset = -1 if where.limit is None else where.limit, where.offset
    order = f"2 {'DESC' if where.descending else 'ASC NULLS LAST'}, 1"
    if is_reversed(where, total):
        limit = max(0, total - offset) if limit < 0 else max(0, min(limit, total - offset))
        offset = max(0, total - offset - limit)
        order = f"2 {'ASC' if where.descending else 'DESC NULLS FIRST'}, 1 DESC"
    return f"{' UNION ALL '.join(arms)} ORDER BY {order} LIMIT ? OFFSET ?", [*values, limit, offset]


def is_reversed(where: TrajectoryFilter, total: int) -> bool:
    """Whether a page is nearer to the end."""
    return where.after is None and where.offset > total // 2
