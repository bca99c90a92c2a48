"""Listings in which the scores of one reward stand as the rewards, for who names it (``list --reward human``)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from itertools import islice

from openhands_rl_plugin.core.browsing.listing import matches
from openhands_rl_plugin.core.browsing.terms import Column, Match, Term
from openhands_rl_plugin.core.judgements import named_score, scores_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectoryOrder, TrajectorySummary

_AT_ONCE = 256


async def rewarded_by(
    storage: TrajectoryStorage, where: TrajectoryFilter, reward: str
) -> AsyncIterator[TrajectorySummary]:
    """What ``where`` finds when the newest scores of ``reward`` are the rewards: bounds, terms and the order of
    rewards look at them. They have no return, which would be another reward. All scores of what the other conditions
    find are read. Raises ``StorageError``."""
    terms = [term for term in where.terms if term.column is Column.REWARD]
    if where.reward_at_least is not None or where.reward_at_most is not None:
        bounds = Match(at_least=where.reward_at_least, at_most=where.reward_at_most)
        terms.append(Term(column=Column.REWARD, any_of=(bounds,)))
    by_reward = where.sort is TrajectoryOrder.REWARD
    others: dict[str, object] = {"limit": None, "offset": 0}
    if by_reward:
        others |= {"sort": TrajectoryOrder.STORED, "descending": False}
    found: list[TrajectorySummary] = []
    batch: list[TrajectorySummary] = []
    async for summary in storage.summaries(without_rewards(where).model_copy(update=others)):
        batch.append(summary)
        if len(batch) == _AT_ONCE:
            found += [each for each in await _rewarded(storage, batch, reward) if matches(each, terms)]
            batch = []
    found += [each for each in await _rewarded(storage, batch, reward) if matches(each, terms)]
    if by_reward:
        sign = -1 if where.descending else 1
        found.sort(key=lambda each: math.inf if each.reward is None else sign * each.reward)
    end = None if where.limit is None else where.offset + where.limit
    for each in islice(found, where.offset, end):
        yield each


def without_rewards(where: TrajectoryFilter) -> TrajectoryFilter:
    """``where`` without what looks at rewards."""
    terms = tuple(term for term in where.terms if term.column is not Column.REWARD)
    return where.model_copy(update={"terms": terms, "reward_at_least": None, "reward_at_most": None})


async def _rewarded(
    storage: TrajectoryStorage, found: Sequence[TrajectorySummary], reward: str
) -> list[TrajectorySummary]:
    scores = await scores_of(storage, [each.id for each in found])
    named = [named_score(scores.get(each.id, ()), reward) for each in found]
    told = [None if score is None or each.failure else score.reward for each, score in zip(found, named, strict=True)]
    return [
        each.model_copy(update={"reward": value, "episode_return": None})
        for each, value in zip(found, told, strict=True)
    ]
