"""Both storages do what a plain model does, whatever is called in which order by two processes that take turns."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from mongodb_server import MongoServer

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    NodeMark,
    TrajectoryFilter,
)
from openhands_rl_plugin.core.types import Node
from openhands_rl_plugin.testing.samples import sample_episode, sample_score, unrewarded
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.storages.log import LogStorage, joined

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
Act = Callable[[LogStorage], Coroutine[Any, Any, Any]]


class Model:
    """What is stored: id -> nodes, and the ids of what has ended; scores and labels in order."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[Node]] = {}
        self.ended: set[str] = set()
        self.scores: list[tuple[str, float | None]] = []
        self.labels: list[Label] = []

    def applied(self, name: str, identity: str, *given: Any) -> tuple[list[Act], bool]:
        """The calls that the operation is, and whether a storage refuses one; what they do is done here, too."""
        sample, known = sample_episode(identity), self.nodes.get(identity)
        is_open = known is not None and identity not in self.ended
        match name:
            case "begin":
                self.nodes.setdefault(identity, [])
                return [lambda storage: storage.begin(EpisodeStart.of(sample))], False
            case "grow" | "end":
                until, overlap, marked = given or (LENGTH, 0, True)
                nodes, stored = unrewarded(sample).nodes, len(known or ())
                until, first = max(until, stored), max(0, stored - overlap)
                late = [node.model_dump(include=LATE) for node in sample.nodes[: until * marked]]
                marks = tuple(NodeMark(index=at, **facts) for at, facts in enumerate(late))
                of = {"trajectory_id": identity, "head": until - 1 if until else None, "marks": marks}
                growth = EpisodeGrowth(first=first, nodes=nodes[first:until], **of)
                if known is not None and is_open:
                    self.nodes[identity] = joined(known, nodes[stored:until], marks)
                calls: list[Act] = [lambda storage: storage.grow(growth)]
                if name == "end":
                    calls.append(lambda storage: storage.end(EpisodeEnd.of(sample)))
                    self.ended |= {identity} if is_open else set()
                return calls, known is None
            case "add":
                self.nodes[identity] = list(sample.nodes)
                self.ended.add(identity)
                return [lambda storage: storage.add(sample)], False
            case "drop":
                if is_open:
                    del self.nodes[identity]
                    self.scores = [each for each in self.scores if each[0] != identity]
                    self.labels = [each for each in self.labels if each.trajectory_id != identity]
                return [lambda storage: storage.drop((identity,))], False
            case "score":
                self.scores.append((identity, given[0]))
                return [lambda storage: storage.add_scores([sample_score(identity, given[0])])], False
            case "label":
                return [self._label(identity, *given)], False
            case _:
                return [lambda storage: storage.close()], False

    def _label(self, identity: str, kind: LabelKind, withdrawn: int | None) -> Act:
        own = [each.id for each in self.labels if each.trajectory_id == identity]
        withdraws = own[withdrawn] if withdrawn is not None and withdrawn < len(own) else None
        of = {"id": f"{next(_NUMBERS)}", "trajectory_id": identity, "withdraws": withdraws}
        label = Label(kind=kind, text="good", at=1.0, **of)
        self.labels.append(label)
        return lambda storage: storage.add_labels([label])

    def found(self, label: str) -> list[str]:
        """The episodes with a label of that name."""
        gone = {each.withdraws for each in self.labels}
        held = [each for each in self.labels if each.withdraws is None and each.id not in gone]
        names = {(each.trajectory_id, "good" if each.kind is LabelKind.TAG else each.kind.value) for each in held}
        return [identity for identity in self.nodes if (identity, label) in names]


_NUMBERS = count()
_DATABASES = count()


async def refused(storage: LogStorage, calls: Sequence[Act]) -> bool:
    try:
        for call in calls:
            await call(storage)
    except StorageError:
        return True
    return False


async def checked(storage: LogStorage, model: Model) -> Any:
    """What is read, as far as both storages must say the same, after a comparison with the model."""
    found = [each async for each in storage.find(TrajectoryFilter(finished=None))]
    assert {one.id: list(one.nodes) for one, _ in found} == model.nodes
    assert {one.id for one, _ in found if one.stop != "unfinished"} == model.ended
    scores = [(one.id, score.reward) for one, scores in found for score in scores]
    assert scores == [each for name in model.nodes for each in model.scores if each[0] == name]
    assert [*await storage.labels(list("abc"))] == model.labels
    for label in ("good", *LabelKind):
        where = TrajectoryFilter(label=label, finished=None)
        assert [each.id async for each in storage.summaries(where)] == model.found(label), label
        assert await storage.count(where) == len(model.found(label))
    good = TrajectoryFilter(reward_at_least=0.5, finished=None)
    summaries = [each async for each in storage.summaries(TrajectoryFilter(finished=None))]
    return [each.model_copy(update={"times": None}) for each in summaries], [
        each.id async for each in storage.summaries(good)
    ]


@settings(max_examples=30)
@given(calls=st.lists(CALLS, min_size=1, max_size=12))
def test_both_do_what_the_model_does(mongodb: MongoServer, calls: list[Any]) -> None:
    async def both(folder: str) -> None:
        name, model = f"operations_{next(_DATABASES)}", Model()
        files = [FileTrajectoryStorage(folder, durable=False) for _ in range(2)]
        storages = files, [MongoDBTrajectoryStorage(mongodb.url, name) for _ in range(2)]
        for turn, call in enumerate(calls):
            acts, refuses = model.applied(*call)
            for pair in storages:
                assert await refused(pair[turn % 2], acts) is refuses, call
        file, other = [await checked(pair[0], model) for pair in storages]
        assert file == other
        await asyncio.gather(*(storage.close() for pair in storages for storage in pair))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(both(folder))
