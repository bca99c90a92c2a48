"""Both storages do what a plain model does, whatever is called in which order by two processes that take turns."""

from __future__ import annotations

import asyncio
import tempfile
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
from openhands_rl_plugin.testing.samples import sample_episode, sample_score, unrewarded
from openhands_rl_plugin.testing.storage import Check, Model, outcome
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.storages.log import LogStorage

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
            own = [each.id for each in model.all_labels.values() if each.trajectory_id == identity]
            withdraws = own[withdrawn] if withdrawn is not None and withdrawn < len(own) else None
            of = {"id": f"{next(_NUMBERS)}", "trajectory_id": identity, "withdraws": withdraws}
            return [("add_labels", [Label(kind=kind, text="good", at=1.0, **of)])]
        case _:
            return [("close", None)]


def labelled(model: Model, label: str) -> list[str]:
    """The episodes with a label of that name."""
    labels = model.all_labels.values()
    gone = {each.withdraws for each in labels}
    held = [each for each in labels if each.withdraws is None and each.id not in gone]
    names = {(each.trajectory_id, "good" if each.kind is LabelKind.TAG else each.kind.value) for each in held}
    return [identity for identity in model.episodes if (identity, label) in names]


_NUMBERS = count()
_DATABASES = count()


async def checked(storage: LogStorage, model: Model) -> Any:
    """What is read, as far as both storages must say the same, after a comparison with the model."""
    await Check(storage, model).compare(TrajectoryFilter(ids=tuple("abc"), finished=None))
    for label in ("good", *LabelKind):
        where = TrajectoryFilter(label=label, finished=None)
        assert [each.id async for each in storage.summaries(where)] == labelled(model, label), label
        assert await storage.count(where) == len(labelled(model, label))
    good = TrajectoryFilter(reward_at_least=0.5, finished=None)
    summaries = [each async for each in storage.summaries(TrajectoryFilter(finished=None))]
    return [each.model_copy(update={"times": None}) for each in summaries], [
        each.id async for each in storage.summaries(good)
    ]


@settings(max_examples=30)
@given(calls=st.lists(CALLS, min_size=1, max_size=12))
def test_both_do_what_the_model_does(mongodb: MongoServer, calls: list[Any]) -> None:
    async def both(folder: str) -> None:
        database, model = f"operations_{next(_DATABASES)}", Model()
        files = [FileTrajectoryStorage(folder, durable=False) for _ in range(2)]
        storages = files, [MongoDBTrajectoryStorage(mongodb.url, database) for _ in range(2)]
        for turn, call in enumerate(calls):
            for name, value in applied(model, *call):
                if name == "close":
                    await asyncio.gather(*(pair[turn % 2].close() for pair in storages))
                    continue
                done = [await outcome(of, name, value) for of in (model, *(pair[turn % 2] for pair in storages))]
                assert len({isinstance(each, StorageError) for each in done}) == 1, call
        file, other = [await checked(pair[0], model) for pair in storages]
        assert file == other
        await asyncio.gather(*(storage.close() for pair in storages for storage in pair))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(both(folder))
