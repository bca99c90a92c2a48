"""Both storages do what a plain model does, whatever is called in which order by two processes that take turns."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Awaitable
from itertools import count, product
from operator import ne
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from mongodb_server import MongoServer

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    NodeMark,
    TrajectoryFilter,
    TrajectoryOrder,
)
from openhands_rl_plugin.core.types import Score, StopReason, Trajectory
from openhands_rl_plugin.testing import sample_episode, sample_score, unrewarded
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.storages.log import LogStorage
from openhands_rl_plugin.trajectories.view import lacks_of

ID, LENGTH = st.sampled_from("abc"), len(sample_episode("a").nodes)
# Operation -> what it is given besides the episode's id. Of "grow": up to which node, how many known ones are sent
# again, and whether rewards that came later are marked; of "label": the number of an earlier one that it withdraws.
OPERATIONS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "begin": (),
    "grow": (st.integers(0, LENGTH), st.integers(0, 2), st.booleans()),
    "end": (),
    "add": (),
    "drop": (),
    "score": (st.sampled_from((None, 0.25, 1.0)),),
    "label": (st.sampled_from(LabelKind), st.none() | st.integers(0, 3)),
    "reopen": (),
}
CALLS = st.sampled_from(sorted(OPERATIONS)).flatmap(lambda name: st.tuples(st.just(name), ID, *OPERATIONS[name]))
LATE = {"reward", "value", "visits", "simulated"}
ALL = TrajectoryFilter(finished=None)
_NUMBERS, _DATABASES = count(), count()


class Model:
    """A storage that holds plain values. Its methods are a storage's, only that they do not wait."""

    def __init__(self) -> None:
        self.episodes: dict[str, Trajectory] = {}
        self.scores: list[Score] = []
        self.labels: list[Label] = []

    def known(self, identity: str) -> Trajectory:
        if identity not in self.episodes:
            raise StorageError("nobody began it")
        return self.episodes[identity]

    def is_open(self, identity: str) -> bool:
        return identity in self.episodes and self.episodes[identity].stop is StopReason.UNFINISHED

    def add(self, trajectory: Trajectory) -> None:
        if trajectory.id not in self.episodes or self.is_open(trajectory.id):
            self.episodes[trajectory.id] = trajectory

    def begin(self, start: EpisodeStart) -> None:
        new = sample_episode(start.id).model_copy(
            update={"nodes": (), "head": None, "stop": StopReason.UNFINISHED, "evidence": {}, "usage": None}
        )
        self.episodes.setdefault(start.id, new)

    def grow(self, growth: EpisodeGrowth) -> None:
        known = self.known(growth.trajectory_id)
        nodes = [*known.nodes, *growth.nodes[len(known.nodes) - growth.first :]]
        for mark in growth.marks:
            nodes[mark.index] = nodes[mark.index].model_copy(update=mark.changes(nodes[mark.index]))
        if self.is_open(known.id):
            self.episodes[known.id] = known.model_copy(update={"nodes": tuple(nodes), "head": growth.head})
        elif tuple(nodes) != known.nodes:
            raise StorageError("new nodes of a finished episode")

    def end(self, end: EpisodeEnd) -> None:
        known = self.known(end.trajectory_id)
        if self.is_open(known.id):
            parts = {name: value for name, value in end if name in Trajectory.model_fields}
            self.episodes[known.id] = known.model_copy(update=parts)

    def drop(self, ids: tuple[str, ...]) -> int:
        gone = [each for each in ids if self.is_open(each)]
        self.episodes = {name: each for name, each in self.episodes.items() if name not in gone}
        self.scores = [each for each in self.scores if each.trajectory_id not in gone]
        self.labels = [each for each in self.labels if each.trajectory_id not in gone]
        return len(gone)

    def add_scores(self, scores: list[Score]) -> None:
        self.scores += scores

    def add_labels(self, labels: list[Label]) -> None:
        self.labels += labels

    def labelled(self, name: str) -> list[str]:
        """The episodes with a label of that name."""
        gone = {each.withdraws for each in self.labels}
        held = [each for each in self.labels if each.withdraws is None and each.id not in gone]
        names = {(each.trajectory_id, "good" if each.kind is LabelKind.TAG else each.kind.value) for each in held}
        return [identity for identity in self.episodes if (identity, name) in names]


def applied(model: Model, name: str, identity: str, *given: Any) -> list[tuple[str, Any]]:
    """The calls that an operation is."""
    sample, known = sample_episode(identity), model.episodes.get(identity)
    match name:
        case "begin":
            return [("begin", EpisodeStart.of(sample))]
        case "grow" | "end":
            until, overlap, marked = given or (LENGTH, 0, True)
            nodes, stored = unrewarded(sample).nodes, len(known.nodes if known else ())
            until, first = max(until, stored), max(0, stored - overlap)
            late = [node.model_dump(include=LATE) for node in sample.nodes[: until * marked]]
            marks = tuple(NodeMark(index=at, **facts) for at, facts in enumerate(late))
            of = {"trajectory_id": identity, "head": until - 1 if until else None, "marks": marks}
            growth = EpisodeGrowth(first=first, nodes=nodes[first:until], **of)
            return [("grow", growth), *([("end", EpisodeEnd.of(sample))] if name == "end" else ())]
        case "add":
            return [("add", sample)]
        case "drop":
            return [("drop", (identity,))]
        case "score":
            return [("add_scores", [sample_score(identity, given[0])])]
        case "label":
            kind, withdrawn = given
            own = [each.id for each in model.labels if each.trajectory_id == identity]
            withdraws = own[withdrawn] if withdrawn is not None and withdrawn < len(own) else None
            of = {"id": f"{next(_NUMBERS)}", "trajectory_id": identity, "withdraws": withdraws}
            return [("add_labels", [Label(kind=kind, text="good", at=1.0, **of)])]
        case _:
            return [("close", None)]


async def outcome(of: Any, name: str, value: Any) -> Any:
    """What a call returns, or the class of the error that it raises."""
    try:
        result = getattr(of, name)(value)
        return await result if isinstance(result, Awaitable) else result
    except StorageError:
        return StorageError


async def checked(storage: LogStorage, model: Model) -> list[Any]:
    """The summaries, after a comparison of all that is read with the model."""
    found = {one.id: (one, scores) async for one, scores in storage.find(ALL)}
    assert list(found) == list(model.episodes)
    summaries = [each async for each in storage.summaries(ALL)]
    for summary in summaries:
        (one, scores), other = found[summary.id], model.episodes[summary.id]
        compared = ("nodes", "head", "stop") + (() if model.is_open(one.id) else ("evidence", "usage", "times"))
        assert all(getattr(one, name) == getattr(other, name) for name in compared), one.id
        assert list(scores) == [each for each in model.scores if each.trajectory_id == one.id]
        newest = newest_outcome(scores)
        facts = (summary.nodes, summary.turns, summary.episode_return, summary.reward, summary.usage, summary.times)
        assert facts == (
            *(len(one.nodes), len(one.acted()), one.known_return, newest and newest.reward),
            *(one.usage, one.times),
        )
    columns = await storage.columns(ALL)
    assert [*zip(columns.ids, columns.groups, columns.segments, strict=True)] == [
        (one.id, one.group_id, sum(bool(node.tokens) and not node.tokens.extends for node in one.nodes))
        for one, _ in found.values()
    ]
    assert str([*columns.rewards]) == str([math.nan if each.judged is None else each.judged for each in summaries])
    assert [*columns.whole] == [not lacks_of(one) for one, _ in found.values()]
    assert await storage.scores("abc") == {
        name: tuple(each for each in model.scores if each.trajectory_id == name)
        for name in {each.trajectory_id for each in model.scores}
    }
    assert list(await storage.labels("abc")) == model.labels
    for label in ("good", *LabelKind):
        where = TrajectoryFilter(label=label, finished=None)
        assert [each.id async for each in storage.summaries(where)] == model.labelled(label), label
        assert await storage.count(where) == len(model.labelled(label))
    return [each.model_copy(update={"times": None}) for each in summaries]


@settings(max_examples=8)
@given(calls=st.lists(CALLS, min_size=1, max_size=12))
def test_both_do_what_the_model_does(mongodb: MongoServer, calls: list[Any]) -> None:
    async def both(folder: str) -> None:
        database, model = f"operations_{next(_DATABASES)}", Model()
        files = [FileTrajectoryStorage(folder, durable=False) for _ in range(2)]
        storages = files, [MongoDBTrajectoryStorage(mongodb.url, database) for _ in range(2)]
        seen: list[str] = [await pair[0].revision() for pair in storages]
        for turn, call in enumerate(calls):
            for name, value in applied(model, *call):
                if name == "close":
                    await asyncio.gather(*(pair[turn % 2].close() for pair in storages))
                    continue
                was = str(vars(model))
                done = [await outcome(of, name, value) for of in (model, *(pair[turn % 2] for pair in storages))]
                assert len(set(done)) == 1, call
                if str(vars(model)) != was:
                    now = [await pair[1 - turn % 2].revision() for pair in storages]
                    assert all(map(ne, now, seen)), call
                    seen = now
        file, other = [await checked(pair[0], model) for pair in storages]
        assert file == other
        for sort, down, offset in product(TrajectoryOrder, (True, False), (0, 1)):
            where = TrajectoryFilter(finished=None, sort=sort, descending=down, offset=offset, limit=2)
            one, same = [[each.id async for each in pair[0].summaries(where)] for pair in storages]
            assert one == same or sort is TrajectoryOrder.FINISHED, where  # open ones grew at other times
        await asyncio.gather(*(storage.close() for pair in storages for storage in pair))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(both(folder))
