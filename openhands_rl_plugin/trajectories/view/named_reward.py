"""Listings in which the scores of one reward stand as the rewards, for who names it (``list --reward human``)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from itertools import islice

from openhands_rl_plugin.core.judgements import named_score, scores_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectoryOrder, TrajectorySummary


async def rewarded_by(
    storage: TrajectoryStorage, where: TrajectoryFilter, reward: str
) -> AsyncIterator[TrajectorySummary]:
    """What ``where`` finds when the newest scores of ``reward`` are the rewards: bounds and the order of rewards look
    at them. They have no return, which would be another reward. All scores of what the other conditions find are read.
    Raises ``StorageError``."""
    by_reward = where.sort is TrajectoryOrder.REWARD
    others: dict[str, object] = {"limit": None, "offset": 0}
    if by_reward:
        others |= {"sort": TrajectoryOrder.STORED, "descending": False}
    summaries = [each async for each in storage.summaries(without_rewards(where).model_copy(update=others))]
    scores = await scores_of(storage, [each.id for each in summaries])
    least, most = where.reward_at_least, where.reward_at_most
    found: list[TrajectorySummary] = []
    for each in summaries:
        score = named_score(scores.get(each.id, ()), reward)
        value = None if score is None or each.failure else score.reward
        inside = value is not None and (least is None or value >= least) and (most is None or value <= most)
        if inside or least is most is None:
            found.append(each.model_copy(update={"reward": value, "episode_return": None}))
    if by_reward:
        sign = -1 if where.descending else 1
        found.sort(key=lambda each: math.inf if each.reward is None else sign * each.reward)
    end = None if where.limit is None else where.offset + where.limit
    for each in islice(found, where.offset, end):
        yield each


def without_rewards(where: TrajectoryFilter) -> TrajectoryFilter:
    """``where`` without what looks at rewards."""
    return where.model_copy(update={"reward_at_least": None, "reward_at_most": None})
