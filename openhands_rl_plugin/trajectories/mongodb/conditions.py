"""Terms in MongoDB's query language, and values that no document has but its fields give."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from openhands_rl_plugin.core.browsing.terms import Column, Match, Term
from openhands_rl_plugin.core.records import TrajectoryOrder

Query = dict[str, Any]

_TOKENS: Query = {"$add": ["$prompt_tokens", "$completion_tokens"]}
_SECONDS: Query = {"$subtract": ["$finished", "$started"]}
COMPUTED_ORDERS: dict[TrajectoryOrder, Query] = {TrajectoryOrder.TOKENS: _TOKENS, TrajectoryOrder.SECONDS: _SECONDS}
"""Sort keys that are computed."""
_COMPUTED: dict[Column, Query] = {Column.TOKENS: _TOKENS, Column.SECONDS: _SECONDS}
_OTHER_NAMES: dict[Column, str] = {
    Column.ID: "_id",
    Column.RUN: "run_id",
    Column.GROUP: "group_id",
    Column.TASK: "task_id",
    Column.MODEL: "base_model",
    Column.VERSION: "policy_version",
    Column.FAILED: "failure_kind",
    Column.RETURN: "episode_return",
}


def field_of(column: Column) -> str:
    """The field of a column that is stored."""
    return _OTHER_NAMES.get(column, column.value)


def summed(document: Mapping[str, Any], order: TrajectoryOrder) -> float:
    """A computed sort key of a document."""
    if order is TrajectoryOrder.TOKENS:
        return document["prompt_tokens"] + document["completion_tokens"]
    return document["finished"] - document["started"]


def term_query(term: Term) -> Query:
    """One term."""
    matches = [_match(term.column, each) for each in term.any_of]
    return {"$nor": matches} if term.negated else {"$or": matches}


def _match(column: Column, match: Match) -> Query:
    bounds = {"$gte": match.at_least, "$lte": match.at_most, "$gt": match.above, "$lt": match.below}
    known = {sign: value for sign, value in bounds.items() if value is not None}
    if column in _COMPUTED:
        return {"$expr": {"$and": [{sign: [_COMPUTED[column], value]} for sign, value in known.items()]}}
    name = field_of(column)
    # A NaN, which is less than any number there, is none that is known.
    known_return: Query = {"$gte": -math.inf} if column is Column.RETURN else {"$ne": None}
    terms: list[Query] = [{name: known_return}]
    if known:
        terms.append({name: known})
    if match.text is not None:
        terms.append({name: match.text})
    if match.like is not None:
        pattern = ".*".join(map(re.escape, match.like))
        terms.append({name: {"$regex": rf"^{pattern}(?![\s\S])", "$options": "s"}})
    versions = {"$gte": match.first_version, "$lte": match.last_version}
    if wanted := {sign: value for sign, value in versions.items() if value is not None}:
        terms.append({"policy_version": wanted})
    return {"$and": terms}
