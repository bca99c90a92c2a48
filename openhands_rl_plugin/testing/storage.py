"""The conformance suite of storages; use it as ``openhands_rl_plugin.testing.check_storage``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.protocols import ReadsScores, TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    TrajectoryFilter,
    TrajectoryOrder,
)
from openhands_rl_plugin.core.types import Score, StopReason, Trajectory
from openhands_rl_plugin.testing.samples import (
    FILTERS,
    GONE,
    one_of_each,
    rewardless,
    sample_episode,
    sample_score,
    steps_of,
    unrewarded,
)

_CONCURRENCY, _MEANWHILE = 8, 4
_DEEPER = 220
"""Levels of nesting that pydantic still writes and no longer reads."""


async def check_storage(make: Callable[[], TrajectoryStorage]) -> None:
    """Write, read, play, filter, sort, score and reopen. Every ``make()`` opens the same store, which starts empty."""
    storage = make()
    await _check_empty(storage)
    for check in (
        _check_adding,
        _check_depth,
        _check_scores,
        _check_labels,
        _check_playing,
        _check_replacing,
        _check_dropping,
        _check_filters,
        _check_order,
        _check_rewardless,
        _check_snapshot,
        _check_concurrency,
    ):
        await check(storage)
    await _check_reopening(storage, make)


async def _check_empty(storage: TrajectoryStorage) -> None:
    if await _found(storage, finished=None) or await storage.count() or [one async for one in storage.summaries()]:
        _broken("the store that make() opens must be empty at the start")
    sample = sample_episode("nobody")
    for step in steps_of(sample)[1:]:
        await _must_raise(_do(storage, step), "grow() and end() must refuse an episode that nobody began")
    if await storage.drop(["nobody"]) != 0:
        _broken("drop() of an unknown id must count nothing")


async def _check_adding(storage: TrajectoryStorage) -> None:
    samples = [
        sample_episode(identity, run="added")
        for identity in ("1", "../2", "drei \N{HOT BEVERAGE}", "\N{OGHAM SPACE MARK}")
    ]
    for one in (*samples, samples[0], samples[0].model_copy(update={"head": 1})):
        await storage.add(one)
    if await _found(storage, run_id="added") != samples:
        _broken("find() must return what was added, equal, once and oldest first")
    if await storage.count(TrajectoryFilter(run_id="added")) != len(samples):
        _broken("count() must count what find() finds")
    unfinished = samples[0].model_copy(update={"id": "open", "stop": StopReason.UNFINISHED})
    await _must_raise(storage.add(unfinished), "add() of an unfinished episode must raise StorageError")
    nul = sample_episode("1\0", run="added")
    for step in (storage.add(nul), _do(storage, steps_of(nul)[0])):
        await _must_raise(step, "an id with a NUL character must raise StorageError")
    if await _found(storage, ids=("1\0",)):
        _broken("find() of an id with a NUL character must find nothing")


async def _check_depth(storage: TrajectoryStorage) -> None:
    value: JsonValue = "deep"
    for _ in range(_DEEPER):
        value = [value]
    deep = sample_episode("deep", run="deep").model_copy(update={"evidence": {"deep": value}})
    with suppress(StorageError):
        await storage.add(deep)
        if await _found(storage, run_id="deep") != [deep]:
            _broken("what is nested too deeply to be read back must be refused with StorageError")
    if len(await _found(storage, run_id="deep")) != await storage.count(TrajectoryFilter(run_id="deep")):
        _broken("what was refused must not be counted")


async def _check_scores(storage: TrajectoryStorage) -> None:
    first, second = sample_score("1", 0.25), sample_score("1", 0.75)
    await storage.add_scores([])
    await storage.add_scores([first, sample_score("too early", 0.5)])
    await storage.add_scores([second])
    if await _scores(storage, "1") != (first, second):
        _broken("add_scores() must append, in order; nothing may be replaced")
    if await _scores(storage, "../2") != ():
        _broken("a score showed up at another trajectory")
    if isinstance(storage, ReadsScores) and await storage.scores(["1", "../2", "nobody"]) != {"1": (first, second)}:
        _broken("scores() must return the scores of the asked episodes that have some, oldest first")
    await storage.add(sample_episode("too early", run="scored"))
    if await _scores(storage, "too early") != (sample_score("too early", 0.5),):
        _broken("a score that came before its trajectory must be found with it")
    await _check_summaries(storage, TrajectoryFilter(run_id="added"))
    await _check_summaries(storage, TrajectoryFilter(run_id="scored"))


async def _check_labels(storage: TrajectoryStorage) -> None:
    if not isinstance(storage, TakesLabels):
        return
    before = await _scores(storage, "1")
    kinds = [*LabelKind, LabelKind.COMMENT]
    labels = [Label(id=f"label {at}", trajectory_id="1", kind=kind, at=float(at)) for at, kind in enumerate(kinds)]
    labels.append(Label(id="other", trajectory_id="nobody", kind=LabelKind.TAG, text="\N{HOT BEVERAGE}", at=0.0))
    await storage.add_labels([])
    await storage.add_labels(labels[:2])
    await storage.add_labels(labels)
    if await storage.labels(["1"]) != tuple(labels[:-1]) or await storage.labels([]) != ():
        _broken("labels() must return the labels of the asked episodes, equal, each once and oldest first")
    if await storage.labels(["nobody", "1"]) != tuple(labels):
        _broken("labels() must return the labels of all asked episodes, also of one that is not stored")
    if await _scores(storage, "1") != before:
        _broken("a label is no score")


async def _check_playing(storage: TrajectoryStorage) -> None:
    sample = sample_episode("played", run="played")
    start, *growths, end = steps_of(sample)
    known = 0
    for step in (start, *growths):
        # Calls may be repeated, because a caller cannot know whether one that got lost was stored.
        for call in (step, step, start):
            await _do(storage, call)
        known += len(step.nodes) if isinstance(step, EpisodeGrowth) else 0
        (so_far,) = await _found(storage, run_id="played", finished=False)
        if so_far.stop is not StopReason.UNFINISHED or len(so_far.nodes) != known:
            _broken(f"after {known} nodes an open episode must be found with them, with stop 'unfinished'")
        if isinstance(step, EpisodeGrowth) and so_far.head != step.head:
            _broken("the head of an open episode must be that of the last growth")
        if any(so_far.nodes[mark.index].reward != mark.reward for mark in getattr(step, "marks", ())):
            _broken("a mark must be seen at the node that it belongs to")
        await _check_summaries(storage, TrajectoryFilter(run_id="played", finished=None))
    if await _found(storage, run_id="played"):
        _broken("find() must leave unfinished episodes out unless it is asked for them")
    gap = EpisodeGrowth(trajectory_id="played", first=known + 1, nodes=sample.nodes[-1:], head=None)
    await _must_raise(storage.grow(gap), "grow() must refuse nodes that leave a gap before them")
    for step in (end, end, start, growths[-1]):
        await _do(storage, step)
    if await _found(storage, run_id="played", finished=None) != [sample]:
        _broken("begin(), grow() and end() must make the same trajectory as add()")
    more = EpisodeGrowth(trajectory_id="played", first=known, nodes=sample.nodes[-1:], head=known)
    await _must_raise(storage.grow(more), "grow() must refuse new nodes of a finished episode")
    await storage.add(sample.model_copy(update={"evidence": {}}))
    if await _found(storage, run_id="played") != [sample]:
        _broken("add() must not change a finished episode")
    await _check_summaries(storage, TrajectoryFilter(run_id="played"))


async def _check_replacing(storage: TrajectoryStorage) -> None:
    sample = sample_episode("replaced", run="replaced")
    other = sample_episode("replaced", run="replaced", text="another")
    for step in steps_of(other)[:3]:
        await _do(storage, step)
    await storage.add_scores([sample_score("replaced", 0.125)])
    await storage.add(sample)
    if await _found(storage, run_id="replaced", finished=None) != [sample]:
        _broken("add() must take the place of an unfinished episode of the same id, as a whole")
    if await _scores(storage, "replaced") != (sample_score("replaced", 0.125),):
        _broken("add() must leave the scores of an unfinished episode alone")


async def _check_dropping(storage: TrajectoryStorage) -> None:
    for identity in ("dropped", "kept"):
        for step in steps_of(sample_episode(identity, run="dropped"))[:3]:
            await _do(storage, step)
    if await storage.drop(["dropped", "nobody", "1"]) != 1:
        _broken("drop() must return how many unfinished episodes it forgot")
    if [one.id for one in await _found(storage, run_id="dropped", finished=None)] != ["kept"]:
        _broken("drop() must forget the unfinished episodes that it is told, and no others")
    if [one.id for one in await _found(storage, ids=("1",))] != ["1"]:
        _broken("drop() must leave finished episodes alone")
    again = sample_episode("dropped", run="again")
    for step in steps_of(again):
        await _do(storage, step)
    if await _found(storage, run_id="again") != [again]:
        _broken("a dropped episode must be forgotten whole, so that it can be played anew")


async def _check_filters(storage: TrajectoryStorage) -> None:
    samples = {one.id: one for one in one_of_each()}
    for one in samples.values():
        await storage.add(one)
    await _do(storage, steps_of(sample_episode("filter open", run="filter"))[0])
    await storage.add_scores(
        [sample_score("filter scored", 0.0), sample_score("filter unknown", 0.9), sample_score("filter scored", 1.0)]
    )
    # What was said is withdrawn, and neither a remark without a reward nor a verifier takes the place of an outcome.
    await storage.add_scores([sample_score("filter unknown", None), sample_score("filter opinion", 0.75)])
    await storage.add_scores(
        [sample_score("filter opinion", 0.0, "verifier-1@x"), sample_score("filter opinion", None, "remark-1")]
    )
    everything = {name for name in samples if name != "filter run"}
    for fields, names in FILTERS:
        expected = everything - names if fields.get("failed") is False else names
        # The run keeps what other checks have stored out of the way.
        where = TrajectoryFilter.model_validate({"run_id": "filter"} | fields)
        ids = await _check_summaries(storage, where)
        if set(ids) != expected or len(ids) != len(expected):
            _broken(f"find({where.model_dump(exclude_defaults=True)}) returned {sorted(ids)}, not {sorted(expected)}")
        if await storage.count(where) != len(expected):
            _broken(f"count({where.model_dump(exclude_defaults=True)}) must count what find() finds")


async def _check_order(storage: TrajectoryStorage) -> None:
    rewards = {"a": 0.5, "b": 0.125, "unknown": 0.25, "c": 0.75, "d": 0.5}
    for at, (name, reward) in enumerate(rewards.items()):
        sample = sample_episode(f"order {name}", run="order", reward=reward, finished=3000.0 - at % 3)
        await storage.add(unrewarded(sample) if name == "unknown" else sample)
    await storage.add_scores(
        [sample_score("order b", 0.875), sample_score("order unknown", None), sample_score("order c", 0.25)]
    )
    await storage.add_scores([sample_score("order c", 0.375)])
    for sort, descending, expected in (
        (TrajectoryOrder.STORED, False, ["a", "b", "unknown", "c", "d"]),
        (TrajectoryOrder.STORED, True, ["d", "c", "unknown", "b", "a"]),
        (TrajectoryOrder.FINISHED, False, ["unknown", "b", "d", "a", "c"]),
        (TrajectoryOrder.FINISHED, True, ["a", "c", "b", "d", "unknown"]),
        (TrajectoryOrder.REWARD, False, ["c", "a", "d", "b", "unknown"]),
        (TrajectoryOrder.REWARD, True, ["b", "a", "d", "c", "unknown"]),
    ):
        for offset, limit in ((0, None), (0, 0), (1, 3), (4, 9), (5, 1)):
            where = TrajectoryFilter(run_id="order", sort=sort, descending=descending, offset=offset, limit=limit)
            names = [trajectory.id.removeprefix("order ") async for trajectory, _ in storage.find(where)]
            if names != (page := expected[offset:][:limit]):
                _broken(
                    f"find({where.model_dump(exclude_defaults=True)}) returned {names}, not {page}: "
                    "equal ones stay in the order in which they were stored, unknown rewards come last"
                )
            if (offset, limit) in ((0, None), (1, 3)):
                await _check_summaries(storage, where)
                if await storage.count(where) != len(expected):
                    _broken("count() must leave offset and limit aside")
        for at, name in enumerate(expected):
            where = TrajectoryFilter(run_id="order", sort=sort, descending=descending, after=f"order {name}")
            names = [summary.id.removeprefix("order ") async for summary in storage.summaries(where)]
            if names != expected[at + 1 :]:
                _broken(f"summaries({where.model_dump(exclude_defaults=True)}) returned {names}, not what comes after")


async def _check_rewardless(storage: TrajectoryStorage) -> None:
    for sample in (lowest := sample_episode("lowest", run="none", reward=-9.0), *rewardless("none")):
        await storage.add(sample)
    scored_first, failing = (sample_episode(f"none {name}", run="none", failure=GONE) for name in ("early", "played"))
    await storage.add_scores([sample_score(scored_first.id, 1.0)])
    await storage.add(scored_first)
    for at, step in enumerate(steps_of(failing)):
        await _do(storage, step)
        if at == 1:
            await storage.add_scores([sample_score(failing.id, 1.0)])
    await storage.add_scores([sample_score("none failed", 1.0)])
    for bound in ({"reward_at_least": -99.0}, {"reward_at_most": 99.0}):
        if [one.id for one in await _found(storage, run_id="none", **bound)] != [lowest.id]:
            _broken("a failed episode has no reward, nor one that nobody scored and no step of which was rewarded")
    for descending in (False, True):
        where = TrajectoryFilter(run_id="none", sort=TrajectoryOrder.REWARD, descending=descending)
        summaries = [one async for one in storage.summaries(where)]
        if summaries[0].id != lowest.id:
            _broken("episodes without a reward come last, in either direction")
        await _check_summaries(storage, where)


async def _check_snapshot(storage: TrajectoryStorage) -> None:
    first = [f"snapshot {at}" for at in range(20)]
    for identity in first:
        await storage.add(sample_episode(identity, run="snapshot"))
    seen = []
    async for trajectory, _ in storage.find(TrajectoryFilter(run_id="snapshot")):
        seen.append(trajectory.id)
        if len(seen) <= _MEANWHILE:
            await storage.add(sample_episode(f"later {len(seen)}", run="snapshot"))
    if seen != first:
        _broken("what is added while a stream is read must not be part of it")


async def _check_concurrency(storage: TrajectoryStorage) -> None:
    samples = [sample_episode(f"at once {at}", run="at once", text="x" * at) for at in range(_CONCURRENCY)]

    async def play(sample: Trajectory) -> None:
        for step in steps_of(sample):
            await _do(storage, step)
        await storage.add_scores([sample_score(sample.id, 0.5)])

    whole = sample_episode("at once, whole", run="at once")
    await asyncio.gather(*map(play, samples), *(storage.add(whole) for _ in range(3)))
    samples.append(whole)
    await storage.add_scores([sample_score(whole.id, 0.5)])
    found = {one.id: one for one in await _found(storage, run_id="at once")}
    if found != {one.id: one for one in samples}:
        _broken(f"{_CONCURRENCY} episodes that were played at the same time must be stored as if one after the other")
    async for sample, scores in storage.find(TrajectoryFilter(run_id="at once")):
        if scores != (sample_score(sample.id, 0.5),):
            _broken("scores that were added at the same time must all be there, once")


async def _check_reopening(storage: TrajectoryStorage, make: Callable[[], TrajectoryStorage]) -> None:
    sample = sample_episode("resumed", run="resumed")
    steps = steps_of(sample)
    for step in steps[:3]:
        await _do(storage, step)
    before = [pair async for pair in storage.find(TrajectoryFilter(finished=None))]
    await storage.close()
    reopened = make()
    if [pair async for pair in reopened.find(TrajectoryFilter(finished=None))] != before:
        _broken("everything must still be there, unchanged, after close() and a new start")
    for step in steps[2:]:
        await _do(reopened, step)
    if await _found(reopened, run_id="resumed") != [sample]:
        _broken("an unfinished episode must go on after close() and a new start")
    await _check_summaries(reopened, TrajectoryFilter(finished=None, sort=TrajectoryOrder.REWARD))
    await reopened.close()


async def _check_summaries(storage: TrajectoryStorage, where: TrajectoryFilter) -> list[str]:
    """Returns the ids of what was found, in order."""
    summaries = [summary async for summary in storage.summaries(where)]
    pairs = [pair async for pair in storage.find(where)]
    if [summary.id for summary in summaries] != [trajectory.id for trajectory, _ in pairs]:
        _broken(f"summaries({where.model_dump(exclude_defaults=True)}) must list what find() finds, in the same order")
    for summary, (trajectory, scores) in zip(summaries, pairs, strict=True):
        told = trajectory.model_dump(include={"id", "run_id", "group_id", "policy", "stop", "usage", "times"})
        told |= {
            "task_id": trajectory.task.id,
            "environment": trajectory.task.environment,
            "split": trajectory.task.split,
        }
        told |= {"strategy": trajectory.strategy.name, "nodes": len(trajectory.nodes)}
        told |= {"turns": len(list(trajectory.sampled())), "episode_return": trajectory.known_return}
        told |= {"failure": trajectory.failure.kind if trajectory.failure else None}
        outcome = newest_outcome(scores)
        told |= {"reward": outcome.reward if outcome is not None else None}
        if (summed := summary.model_dump()) != told:
            wrong = sorted(name for name in told if told[name] != summed[name])
            _broken(f"the summary of {trajectory.id!r} does not say what the trajectory says: {', '.join(wrong)}")
    return [trajectory.id for trajectory, _ in pairs]


async def _found(storage: TrajectoryStorage, **fields: object) -> list[Trajectory]:
    return [trajectory async for trajectory, _ in storage.find(TrajectoryFilter.model_validate(fields))]


async def _scores(storage: TrajectoryStorage, trajectory_id: str) -> tuple[Score, ...]:
    found = [pair async for pair in storage.find(TrajectoryFilter(ids=(trajectory_id,)))]
    if [trajectory.id for trajectory, _ in found] != [trajectory_id]:
        _broken(f"find(ids=({trajectory_id!r},)) must find that one only, not {len(found)}")
    return found[0][1]


async def _do(storage: TrajectoryStorage, step: EpisodeStart | EpisodeGrowth | EpisodeEnd) -> None:
    if isinstance(step, EpisodeStart):
        await storage.begin(step)
    elif isinstance(step, EpisodeGrowth):
        await storage.grow(step)
    else:
        await storage.end(step)


async def _must_raise(call: Awaitable[object], rule: str) -> None:
    try:
        await call
    except StorageError:
        return
    _broken(rule)


def _broken(rule: str) -> NoReturn:
    raise AssertionError(rule)
