"""Judgements beside the episodes of a MongoDB store, and the newest one in the episode's own document.

A score comes first, and then the document of its episode; in between, and as long as there is no such episode, the
score is ``pending``. A reader of rewards settles pending scores first, so a process that was killed in between
does no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pymongo import UpdateOne

from openhands_rl_plugin.core.errors import DamagedError
from openhands_rl_plugin.core.judgements import is_opinion, newest_outcome
from openhands_rl_plugin.core.records import DamagedRecord, Label
from openhands_rl_plugin.core.types import Score, pays_rewards
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.headers import score_change
from openhands_rl_plugin.trajectories.storages.packing import note_lost, packed_json, parsed_json

_AT_ONCE = 1000
_UPGRADED = {"_id": "judged by the newest outcome"}


class ScoreBook:
    """Scores are numbered; the higher the number, the newer. Labels are beside them."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database
        self._upgraded = False

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
        await self._apply({first + at: score for at, score in enumerate(scores)})

    async def settle(self) -> None:
        """Write the newest judgement into every episode's document."""
        await self._upgrade()
        scores: dict[int, Score] = {}
        async for each in self._database.scores.find({"pending": True}, {"episode": 1, "score": 1}):
            # One that is damaged is told when its episode is read.
            with suppress(DamagedError):
                scores[each["_id"]] = parsed_json(Score, each["episode"], each["score"])
        await self._apply(scores)

    async def of(
        self, trajectory_ids: Sequence[str], lost: list[DamagedRecord] | None = None
    ) -> Mapping[str, Sequence[Score]]:
        """Id -> its scores, oldest first. With ``lost`` damaged ones are added to it instead of being an error."""
        if not trajectory_ids:
            return {}
        found = await self._database.scores.find({"episode": {"$in": list(trajectory_ids)}}).to_list()
        scores: dict[str, list[Score]] = defaultdict(list)
        for each in sorted(found, key=lambda document: document["_id"]):
            try:
                scores[each["episode"]].append(parsed_json(Score, each["episode"], each["score"]))
            except DamagedError as error:
                if lost is None:
                    raise
                note_lost(lost, DamagedRecord(what="score", id=each["episode"], row=each["_id"], cause=str(error)))
        return scores

    async def add_labels(self, labels: Sequence[Label]) -> None:
        """Append labels, each once."""
        first = await self._database.next("labels", len(labels))
        documents = [
            {"order": number, "episode": label.trajectory_id, "label": packed_json(label)}
            for number, label in enumerate(labels, first)
        ]
        changes = [
            UpdateOne({"_id": label.id}, {"$setOnInsert": document}, upsert=True)
            for label, document in zip(labels, documents, strict=True)
        ]
        await self._database.labels.bulk_write(changes)

    async def labels_of(
        self, trajectory_ids: Sequence[str], lost: list[DamagedRecord] | None = None
    ) -> tuple[Label, ...]:
        """The labels of these episodes, oldest first. ``lost`` as for ``of``."""
        if not trajectory_ids:
            return ()
        found = await self._database.labels.find({"episode": {"$in": list(trajectory_ids)}}).to_list()
        ordered = sorted(found, key=lambda document: document["order"])
        labels: list[Label] = []
        for each in ordered:
            try:
                labels.append(parsed_json(Label, each["_id"], each["label"]))
            except DamagedError as error:
                if lost is None:
                    raise
                note_lost(lost, DamagedRecord(what="label", id=each["episode"], row=each["order"], cause=str(error)))
        return tuple(labels)

    async def _apply(self, scores: Mapping[int, Score]) -> None:
        numbers = sorted(scores)
        for at in range(0, len(numbers), _AT_ONCE):
            await self._apply_some({number: scores[number] for number in numbers[at : at + _AT_ONCE]})

    async def _apply_some(self, scores: Mapping[int, Score]) -> None:
        asked = sorted({score.trajectory_id for score in scores.values()})
        # Looked up before the change: an episode that comes in between stays pending rather than be forgotten.
        known = await self._returns({"_id": {"$in": asked}})
        applied = {number: score for number, score in scores.items() if score.trajectory_id in known}
        if not applied:
            return
        outcomes = {number: score for number, score in sorted(applied.items()) if not is_opinion(score.reward_version)}
        newest = {score.trajectory_id: (number, score.reward) for number, score in outcomes.items()}
        await self._judge(newest, known)
        await self._database.scores.update_many({"_id": {"$in": list(applied)}}, {"$unset": {"pending": ""}})

    async def _judge(self, newest: Mapping[str, tuple[int, float | None]], returns: Mapping[str, float | None]) -> None:
        """Write judgements, id -> (its number, its reward). One without a reward withdraws what was said before."""
        earlier = await self.of([identity for identity, (_, reward) in newest.items() if reward is None], lost=[])
        changes: list[UpdateOne] = []
        for identity, (number, reward) in newest.items():
            if reward is None and (found := newest_outcome(earlier.get(identity, ()))) is not None:
                reward = found.reward
            change = score_change(number, reward, returns[identity])
            changes.append(UpdateOne({"_id": identity, "scored": {"$lt": number}}, change))
        if changes:
            await self._database.episodes.bulk_write(changes, ordered=False)

    async def _returns(self, where: dict[str, Any]) -> dict[str, float | None]:
        """Id -> its return, of those episodes that are there."""
        found = self._database.episodes.find(where, {"episode_return": 1})
        return {each["_id"]: each["episode_return"] async for each in found}

    async def _upgrade(self) -> None:
        """Earlier releases took the newest score of any version, opinions too, and a session's 0 as its return."""
        if self._upgraded or await self._database.counters.find_one(_UPGRADED):
            self._upgraded = True
            return
        returns = await self._returns({})
        ids = sorted(returns)
        for at in range(0, len(ids), _AT_ONCE):
            some = ids[at : at + _AT_ONCE]
            numbers: dict[str, int] = {}
            async for each in self._database.scores.find({"episode": {"$in": some}}, {"episode": 1}):
                numbers[each["episode"]] = max(each["_id"], numbers.get(each["episode"], 0))
            # So that the scores count as newer than what the episode knows.
            await self._database.episodes.update_many({"_id": {"$in": list(numbers)}}, {"$set": {"scored": 0}})
            await self._judge({identity: (number, None) for identity, number in numbers.items()}, returns)
        unpaid = {"score": None, "episode_return": 0, "failure_kind": None}
        async for each in self._database.episodes.find(unpaid, {"environment": 1}):
            if not pays_rewards(each["environment"], {}):
                nothing = {"episode_return": None, "reward": None, "unrewarded": True}
                await self._database.episodes.update_one({"_id": each["_id"]}, {"$set": nothing})
        await self._database.counters.update_one(_UPGRADED, {"$set": {"value": 1}}, upsert=True)
        self._upgraded = True
