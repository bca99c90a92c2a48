"""The conformance suite of storages; use it as ``openhands_rl_plugin.testing.check_storage``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NoReturn

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.core.types import PolicyRef, Score, StopReason, Trajectory
from openhands_rl_plugin.testing.samples import GONE, sample_episode, sample_score, steps_of, unrewarded

_DEEPER = 220
"""Levels of nesting that pydantic still writes and no longer reads."""
_METHODS = {"EpisodeStart": "begin", "EpisodeGrowth": "grow", "EpisodeEnd": "end"}
# What each episode has that no other one has: the arguments of the sample, and what finds it.
_ODD: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *(({name: f"../other {name}"}, {f"{name}_id": f"../other {name}"}) for name in ("group", "task")),
    *(({name: f"../other {name}"}, {name: f"../other {name}"}) for name in ("environment", "split", "strategy")),
    ({"policy": PolicyRef(base_model="other", adapter="other", version=7)}, {"adapter": "other"}),
    ({"policy": PolicyRef(base_model="base", adapter="shop", version=8)}, {"policy_version": 8}),
    ({"stop": StopReason.MAX_TURNS}, {"stop": StopReason.MAX_TURNS}),
    ({"stop": StopReason.ERROR, "failure": GONE, "reward": 9.0}, {"failed": True}),
    ({"reward": 0.875}, {"reward_at_least": 0.75}),
    ({"reward": -9.0}, {"reward_at_most": 0.25}),
    ({"finished": 2010.0}, {"since": 2010.0}),
    ({"finished": 1990.0}, {"until": 1999.0}),
)


async def check_storage(make: Callable[[], TrajectoryStorage]) -> None:
    """Write, read, filter, sort, score and reopen. Every ``make()`` opens the same store, which starts empty.

    Raises ``AssertionError`` with the rule that was broken.
    """
    storage = make()
    if await storage.count(TrajectoryFilter(finished=None)):
        _broken("the store that make() opens must be empty at the start")
    await _check_steps(storage)
    await _check_judgements(storage)
    await _check_filters(storage)
    await _check_together(storage)
    # An unfinished episode goes on after a new start.
    sample = sample_episode("resumed")
    start, first, *others = steps_of(sample)
    await _store(storage, start, first)
    await storage.close()
    storage = make()
    if not await storage.count(TrajectoryFilter(ids=(sample.id,), finished=False)):
        _broken("an unfinished episode must be there after close() and a new make()")
    await _store(storage, *others)
    await _expect(storage, TrajectoryFilter(ids=(sample.id,)), [sample], "after close() and a new make()")
    await storage.close()


async def _check_steps(storage: TrajectoryStorage) -> None:
    """An episode is the same in steps and at once, and each step may be repeated."""
    sample, other = sample_episode("in steps"), sample_episode("in steps").model_copy(update={"head": 1})
    where = TrajectoryFilter(ids=(sample.id,), finished=None)
    start, *growths, end = steps_of(sample)
    for step in (*growths, end):
        await _refused(storage, _METHODS[type(step).__name__], step, "an episode that nobody began")
    for step in (start, *growths, end):
        await _store(storage, step, step, start)
        await _refused(storage, "grow", growths[-1].model_copy(update={"first": 9}), "a gap before the nodes")
        found = [one async for one, _ in storage.find(where)]
        if [one.stop is StopReason.UNFINISHED for one in found] != [step is not end]:
            _broken(f"{_METHODS[type(step).__name__]}() must leave one episode, unfinished until end()")
    await storage.add(other)
    await _expect(storage, where, [sample], "a finished episode stays as it is")
    for odd in (sample_episode("nul\0"), sample.model_copy(update={"id": "new", "stop": StopReason.UNFINISHED})):
        await _refused(storage, "add", odd, "an id with a NUL character, or an unfinished episode")
    replaced, dropped = sample_episode("replaced"), sample_episode("dropped")
    for one in (replaced, dropped):
        await _store(storage, *steps_of(one)[:2])
        await storage.add_scores([sample_score(one.id, 0.125)])
    await storage.add(replaced)
    if (gone := await storage.drop(["dropped", "nobody", "in steps"])) != 1:
        _broken(f"drop() returned {gone}, not 1: it deletes unfinished episodes only")
    await _expect(storage, TrajectoryFilter(ids=("replaced", "dropped"), finished=None), [replaced], "after drop()")
    if await storage.scores(["dropped"]):
        _broken("drop() must delete the scores of the episode, too")
    value: Any = reduce(lambda inner, _: [inner], range(_DEEPER), "deep")
    deep = sample_episode("deep").model_copy(update={"evidence": {"deep": value}})
    await _refused(storage, "add", deep, "what is nested too deeply to be read back")


async def _check_judgements(storage: TrajectoryStorage) -> None:
    judged, ids = sample_episode("judged"), ["judged", "nobody"]
    scores = (sample_score("judged", 0.25), sample_score("judged", 0.25), sample_score("judged", 0.75))
    await storage.add_scores(scores[:2])
    await storage.add(judged)
    await storage.add_scores(scores[2:])
    found = [(one, given) async for one, given in storage.find(TrajectoryFilter(ids=("judged",)))]
    if found != [(judged, scores)] or dict(await storage.scores(ids)) != {"judged": scores}:
        _broken("an episode must have the scores that were added, each once, oldest first")
    label = Label(id="1", trajectory_id="judged", kind=LabelKind.TAG, text="good", at=0.0)
    for _ in range(2):
        await storage.add_labels([label])
    if await storage.labels(ids) != (label,):
        _broken("labels() must return the labels of these episodes, each once")
    await _expect(storage, TrajectoryFilter(label="good"), [judged], "a label finds its episode")


async def _check_filters(storage: TrajectoryStorage) -> None:
    usual, unknown = sample_episode("usual", run="odd"), unrewarded(sample_episode("unknown", run="odd"))
    odd = [sample_episode(f"odd {at}", run="odd", **given) for at, (given, _) in enumerate(_ODD)]
    everything = [usual, *odd, unknown]
    for each in everything:
        await storage.add(each)
    await _store(storage, *steps_of(sample_episode("open", run="odd"))[:2])
    for one, (_, asked) in zip(odd, _ODD, strict=True):
        await _expect(storage, TrajectoryFilter(run_id="odd", **asked), [one], "a filter finds what matches")
    await _expect(storage, TrajectoryFilter(contains="ther t"), [odd[1]], "contains looks into the names")
    by_reward = sorted(everything, key=lambda each: (each.known_return is None, each.known_return or 0.0))
    for order, listed in ((TrajectoryOrder.STORED, everything), (TrajectoryOrder.REWARD, by_reward)):
        for page in ({}, {"offset": 1, "limit": 3}, {"limit": 0}):
            where = TrajectoryFilter.model_validate({"run_id": "odd", "sort": order, **page})
            shown = listed[where.offset :][: where.limit]
            await _expect(storage, where, shown, "in order, unknown rewards last", count=len(listed))


async def _check_together(storage: TrajectoryStorage) -> None:
    """What is added while a stream is read is no part of it; what is stored at the same time is there."""
    where = TrajectoryFilter(run_id="together")
    samples = [sample_episode(f"at once {at}", run="together") for at in range(20)]
    await asyncio.gather(*(_store(storage, *steps_of(one)) for one in samples))
    seen: list[str] = []
    async for trajectory, _ in storage.find(where):
        seen.append(trajectory.id)
        await storage.add(sample_episode(f"later {len(seen)}", run="together"))
    if sorted(seen) != sorted(one.id for one in samples):
        _broken("episodes of several callers must all be there, and what is added while a stream is read is not in it")


async def _store(storage: TrajectoryStorage, *steps: Any) -> None:
    for step in steps:
        await getattr(storage, _METHODS[type(step).__name__])(step)


async def _refused(storage: TrajectoryStorage, name: str, given: Any, what: str) -> None:
    try:
        await getattr(storage, name)(given)
    except StorageError:
        return
    _broken(f"{name}() must raise StorageError for {what}")


async def _expect(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    wanted: Sequence[Trajectory],
    rule: str,
    count: int | None = None,
) -> None:
    """Whether all methods that read find these episodes."""
    what = f"find({where.model_dump(exclude_defaults=True)})"
    found: list[tuple[Trajectory, tuple[Score, ...]]] = [pair async for pair in storage.find(where)]
    if [one.id for one, _ in found] != [one.id for one in wanted]:
        _broken(f"{rule}: {what} returned {[one.id for one, _ in found]}, not {[one.id for one in wanted]}")
    for (one, _), other in zip(found, wanted, strict=True):
        if wrong := [name for name, value in other if value != getattr(one, name)]:
            _broken(f"{rule}: {one.id!r} has other {', '.join(wrong)} than were stored")
    listed = [(each.id, each.turns, each.usage, each.times) async for each in storage.summaries(where)]
    if listed != [(each.id, len(each.acted()), each.usage, each.times) for each in wanted]:
        _broken(f"{what}: summaries() must list what find() finds, in the same order, and say the same of it")
    if await storage.count(where) != (len(wanted) if count is None else count):
        _broken(f"{what}: count() must count what find() finds, and leave offset and limit aside")


def _broken(rule: str) -> NoReturn:
    raise AssertionError(rule)
