"""Judgements beside the episodes of a MongoDB store, and the newest one in the episode's own document.

A score comes first, and then the document of its episode; in between, and as long as there is no such episode, the
score is ``pending``. A reader of rewards settles pending scores first, so a process that was killed in between
does no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pymongo import UpdateOne

from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.headers import score_change
from openhands_rl_plugin.trajectories.storages.documents import packed_json, parsed_json

_AT_ONCE = 1000


class ScoreBook:
    """Scores are numbered; of an episode's scores the one with the highest number is the newest."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database

    async def add(self, scores: Sequence[Score]) -> None:
        """Append in this order."""
        packed = [packed_json(score) for score in scores]
        first = await self._database.next("scores", len(scores))
        await self._database.scores.insert_many(
            {
                "_id": number,
                "episode": score.trajectory_id,
                "reward": score.reward,
                "score": document,
                "pending": True,
            }
            for number, (score, document) in enumerate(zip(scores, packed, strict=True), first)
        )
        await self._apply({first + at: (score.trajectory_id, score.reward) for at, score in enumerate(scores)})

    async def settle(self) -> None:
        """Write the newest score into every episode's document."""
        pending = self._database.scores.find({"pending": True}, {"episode": 1, "reward": 1})
        await self._apply({each["_id"]: (each["episode"], each["reward"]) async for each in pending})

    async def of(self, trajectory_ids: Sequence[str]) -> Mapping[str, Sequence[Score]]:
        """Id -> its scores, oldest first."""
        found = await self._database.scores.find({"episode": {"$in": list(trajectory_ids)}}).to_list()
        scores: dict[str, list[Score]] = defaultdict(list)
        for each in sorted(found, key=lambda document: document["_id"]):
            scores[each["episode"]].append(parsed_json(Score, each["episode"], each["score"]))
        return scores

    async def _apply(self, rewards: Mapping[int, tuple[str, float | None]]) -> None:
        numbers = sorted(rewards)
        for at in range(0, len(numbers), _AT_ONCE):
            await self._apply_some({number: rewards[number] for number in numbers[at : at + _AT_ONCE]})

    async def _apply_some(self, rewards: Mapping[int, tuple[str, float | None]]) -> None:
        asked = {"_id": {"$in": sorted({identity for identity, _ in rewards.values()})}}
        # Looked up before the change: an episode that comes in between stays pending rather than be forgotten.
        known = {each["_id"] async for each in self._database.episodes.find(asked, {"_id": 1})}
        applied = {number: each for number, each in rewards.items() if each[0] in known}
        if not applied:
            return
        newest = {identity: (number, reward) for number, (identity, reward) in sorted(applied.items())}
        await self._database.episodes.bulk_write(
            [
                UpdateOne({"_id": identity, "scored": {"$lt": number}}, score_change(number, reward))
                for identity, (number, reward) in newest.items()
            ],
            ordered=False,
        )
        await self._database.scores.update_many({"_id": {"$in": list(applied)}}, {"$unset": {"pending": ""}})
