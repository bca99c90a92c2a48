"""Both storages find, count and sort the same episodes, whatever is asked: one table of values for both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from mongodb_server import MongoServer
from stored_samples import play

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.core.types import FailureKind, PolicyRef, StopReason, Trajectory
from openhands_rl_plugin.testing import GONE, sample_episode, sample_score, steps_of, unrewarded
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TEXTS = (
    *("", "shop", "Shop", "shop-v000007", "a.b*[c]\\", "$shop", "'; DROP TABLE episodes; --\"%_?"),
    "\N{LATIN SMALL LETTER SHARP S}",
    "two\nlines",
    "nul\0",
)
NUMBERS = (-9e8, -1.0, 0.0, 0.5, 1.0, 2000.0, 9e8)
VERSIONS = (None, 0, 7, 8, -1, 2**53 + 1, 2**63 - 2, 2**63 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("run_id", "task_id", "split", "adapter", "contains"), st.sampled_from(TEXTS)),
    **dict.fromkeys(("reward_at_least", "reward_at_most", "since", "until"), st.sampled_from(NUMBERS)),
    "policy_version": st.sampled_from(VERSIONS),
    "stop": st.sampled_from(StopReason),
    "failed": st.booleans(),
    "failure_kind": st.sampled_from(FailureKind),
    "finished": st.none() | st.booleans(),
    "ids": st.lists(st.sampled_from(("0", "1", "7", "nobody", "", "nul\0")), max_size=3).map(tuple),
    "sort": st.sampled_from(TrajectoryOrder),
    "descending": st.booleans(),
    "offset": st.integers(0, 12),
    "limit": st.none() | st.integers(0, 5),
}
ASKED = st.sets(st.sampled_from(sorted(VALUES)), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in sorted(names)})
)


def episodes() -> Iterator[Trajectory]:
    """Every value of every field, each beside several of the others."""
    adapters, versions = (None, *TEXTS[:-1]), VERSIONS[:-1]
    for at in range(27):
        adapter, version = adapters[at % len(adapters)], versions[at % len(versions)]
        text = TEXTS[at % (len(TEXTS) - 1)]
        policy = PolicyRef(base_model=f"base {text}", adapter=adapter, version=version)
        more = {"stop": StopReason.ERROR, "failure": GONE} if at % 5 == 4 else {"reward": NUMBERS[at // 3 % 7]}
        one = sample_episode(str(at), run=text, task=text, policy=policy, finished=2000.0 + at % 3, split=text, **more)
        yield unrewarded(one) if at % 7 == 6 else one


async def filled(storage: TrajectoryStorage) -> None:
    for at, one in enumerate(episodes()):
        await play(storage, islice(steps_of(one), 3 if at % 11 == 10 else None))
    known = ((1, 0.5), (2, None), (3, 9e8), (4, 1.0))
    await storage.add_scores([sample_score(str(at), value) for at, value in known])


async def told(storage: TrajectoryStorage, where: TrajectoryFilter) -> Any:
    try:
        return [each.id async for each in storage.summaries(where)], await storage.count(where)
    except StorageError:
        return StorageError


def test_both_find_the_same(mongodb: MongoServer, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        both = FileTrajectoryStorage(tmp_path, durable=False), MongoDBTrajectoryStorage(mongodb.url, "same_answers")
        for storage in both:
            runner.run(filled(storage))

        @settings(max_examples=20)
        @given(ASKED)
        def ask(fields: dict[str, Any]) -> None:
            where = TrajectoryFilter(**fields)
            one, other = (runner.run(told(storage, where)) for storage in both)
            assert one == other, where
            whole = runner.run(told(both[0], where.model_copy(update={"offset": 0, "limit": None})))
            end = None if where.limit is None else where.offset + where.limit
            assert one is StorageError or one[0] == whole[0][where.offset : end]

        ask()
        for storage in both:
            runner.run(storage.close())
