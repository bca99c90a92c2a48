"""Filters in SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence

from openhands_rl_plugin.core.records import SEARCHED, TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason

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
