"""Filters in SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence

from openhands_rl_plugin.core.browsing.terms import TEXTS, Column, Match, Term
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason

# Written out, because an index that leaves out unfinished episodes is only used for a query that says so, too.
FINISHED = f"stop <> '{StopReason.UNFINISHED.value}'"
UNFINISHED = f"stop = '{StopReason.UNFINISHED.value}'"

NO_RETURN = "none"
"""The return's column where there is none; NULL is not allowed there."""

Condition = tuple[str, list[object]]
"""SQL and the values of its parameters."""

TOKENS, SECONDS = "(prompt_tokens + completion_tokens)", "(finished - started)"
COLUMNS: dict[Column, str] = {
    Column.ID: "id",
    Column.RUN: "run_id",
    Column.GROUP: "group_id",
    Column.TASK: "task_id",
    Column.ENVIRONMENT: "environment",
    Column.SPLIT: "split",
    Column.STRATEGY: "strategy",
    Column.MODEL: "base_model",
    Column.ADAPTER: "adapter",
    Column.VERSION: "policy_version",
    Column.STOP: "stop",
    Column.FAILED: "failure_kind",
    Column.REWARD: "reward",
    Column.RETURN: "iif(typeof(episode_return) = 'text', NULL, episode_return)",
    Column.NODES: "nodes",
    Column.TURNS: "turns",
    Column.TOKENS: TOKENS,
    Column.CALLS: "calls",
    Column.STEPS: "steps",
    Column.SECONDS: SECONDS,
    Column.STARTED: "started",
    Column.FINISHED: "finished",
}
"""What stands for a column in SQL."""
_LAST = "\U0010ffff"


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
    for term in where.terms:
        condition, more = _term(term)
        terms.append(condition)
        values += more
    return " AND ".join(terms) or "TRUE", values


def one_value(ids: Sequence[str]) -> str:
    """For ``json_each``, because a query may have only so many values. There a NUL ends a text, and no id has one."""
    return json.dumps([each for each in ids if "\0" not in each])


def _term(term: Term) -> Condition:
    column, values = COLUMNS[term.column], list[object]()
    equal = [each.text for each in term.any_of if each.text is not None and each == Match(text=each.text)]
    parts: list[str] = []
    if term.column in TEXTS and equal:
        parts.append(f"{column} IN (SELECT value FROM json_each(?))")
        values.append(one_value(equal))
    for each in term.any_of:
        if term.column not in TEXTS or each.text is None or each != Match(text=each.text):
            condition, more = _match(column, each)
            parts.append(condition)
            values += more
    joined = f"({' OR '.join(parts)})"
    # What is unknown matches nothing, so it is none of them.
    return (f"NOT coalesce({joined}, FALSE)" if term.negated else joined), values


def _match(column: str, match: Match) -> Condition:
    terms, values = [f"{column} IS NOT NULL"], list[object]()
    bounds = (
        (f"{column} =", match.text),
        (f"{column} >=", match.at_least),
        (f"{column} <=", match.at_most),
        (f"{column} >", match.above),
        (f"{column} <", match.below),
        ("policy_version >=", match.first_version),
        ("policy_version <=", match.last_version),
    )
    for sql, value in bounds:
        if value is not None:
            terms.append(f"{sql} ?")
            values.append(value)
    if match.like is not None:
        beginning = match.like[0]
        if beginning:
            # What an index finds; the pattern is the exact condition.
            terms.append(f"{column} >= ? AND {column} < ?")
            values += [beginning, beginning + _LAST]
        if match.like[1:] != ("",) or _LAST in beginning:
            terms.append(f"{column} GLOB ?")
            values.append("*".join(map(_literal, match.like)))
    return f"({' AND '.join(terms)})", values


def _literal(piece: str) -> str:
    """A text in a GLOB pattern, in which a bracket makes any other sign its own."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in piece)
