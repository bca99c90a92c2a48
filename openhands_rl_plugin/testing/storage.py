"""The conformance suite of storages; use it as ``openhands_rl_plugin.testing.check_storage``.

A table of operations is applied to a storage and to a ``Model``, a plain one in memory that says what must be found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NoReturn

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.protocols import ReadsScores, TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import (
    SEARCHED,
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    TrajectoryFilter,
    TrajectoryOrder,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import FailureKind, PolicyRef, Score, StopReason, Times, Trajectory
from openhands_rl_plugin.testing.samples import GONE, sample_episode, sample_score, steps_of, unrewarded

Found = list[tuple[Trajectory, tuple[Score, ...]]]
Call = tuple[str, Any]
"""The name of a storage's method, and what it is given."""

_CONCURRENCY = 8
_DEEPER = 220
"""Levels of nesting that pydantic still writes and no longer reads."""

_POLICY = sample_episode("any").policy
# What an episode has that no other one has: its name, and the arguments of the sample.
_ODD: dict[str, dict[str, Any]] = {
    "usual": {},
    **{name: {name: f"../other {name}"} for name in ("group", "task", "environment", "split", "strategy")},
    "adapter": {"policy": _POLICY.model_copy(update={"adapter": "other"})},
    "version": {"policy": _POLICY.model_copy(update={"version": 8})},
    "base": {"policy": PolicyRef(base_model="base")},
    "stop": {"stop": StopReason.MAX_TURNS},
    "failed": {"stop": StopReason.ERROR, "failure": GONE, "reward": -9.0},
    "grader": {"stop": StopReason.ERROR, "failure": GONE.model_copy(update={"kind": FailureKind.GRADER})},
    **{f"return {reward}": {"reward": reward} for reward in (-9.0, 0.0, 0.25, 0.875)},
    **{f"at {time}": {"finished": time} for time in (1990.0, 2010.0)},
}
_EQUAL = ("group_id", "task_id", "environment", "split", "strategy", "adapter", "policy_version", "stop")
_ASKED: tuple[dict[str, Any], ...] = (
    *({"run_id": "nobody"}, {"failed": True}, {"failed": False}, {"finished": False}, {"ids": ()}),
    *({"stop": StopReason.UNFINISHED, "finished": None}, {"ids": ("odd base", "1", "nobody", "odd base")}),
    *({"contains": text} for text in ("d s", "../other t", "d S")),
    *({"failure_kind": each} for each in FailureKind),
    *({"reward_at_least": least} for least in (-99.0, 0.25, 0.75)),
    *({"reward_at_most": most} for most in (0.25, 99.0)),
    {"reward_at_least": 0.875, "reward_at_most": 0.875},
    *({"since": 2000.5}, {"until": 1999.5}, {"since": 1990.0, "until": 1990.0}),
    {"finished": None, "adapter": "shop", "policy_version": 7, "strategy": "../other strategy"},
)
_PAGES = (
    {"offset": 1, "limit": 3},
    {"limit": 0},
    {"offset": 19, "limit": 9},
    {},
    {"after": "odd base"},
    {"after": "odd unknown"},
)
_KEYS: dict[TrajectoryOrder, Callable[[TrajectorySummary], float | None]] = {
    TrajectoryOrder.FINISHED: lambda each: each.times.finished,
    TrajectoryOrder.REWARD: lambda each: each.judged,
    TrajectoryOrder.TURNS: lambda each: each.turns,
    TrajectoryOrder.TOKENS: lambda each: each.usage.prompt_tokens + each.usage.completion_tokens,
    TrajectoryOrder.SECONDS: lambda each: each.times.finished - each.times.started,
}


class Model:
    """A storage that holds plain values: id -> episode, and all scores, in order. Its methods are a storage's, only
    that they do not wait. Raises ``StorageError`` for what a storage must refuse, and changes nothing then."""

    def __init__(self) -> None:
        self.episodes: dict[str, Trajectory] = {}
        self.all_scores: list[Score] = []
        self.all_labels: dict[str, Label] = {}

    def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        if "\0" in trajectory.id or trajectory.stop is StopReason.UNFINISHED:
            raise StorageError("an episode that is not finished, or an id with a NUL character")
        if trajectory.id not in self.episodes or self.is_open(trajectory.id):
            self.episodes[trajectory.id] = trajectory

    def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        if "\0" in start.id:
            raise StorageError("an id with a NUL character")
        times = Times(started=start.started, finished=start.started)
        parts: dict[str, Any] = {name: value for name, value in start if name != "started"}
        unfinished = Trajectory(**parts, times=times, nodes=(), head=None, stop=StopReason.UNFINISHED)
        self.episodes.setdefault(start.id, unfinished)

    def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        known = self.episodes.get(growth.trajectory_id)
        if known is None or growth.first > len(known.nodes):
            raise StorageError("an episode that nobody began, or a gap before the nodes")
        nodes = [*known.nodes, *growth.nodes[len(known.nodes) - growth.first :]]
        for mark in growth.marks:
            nodes[mark.index] = nodes[mark.index].model_copy(update=mark.changes(nodes[mark.index]))
        if self.is_open(known.id):
            self.episodes[known.id] = known.model_copy(update={"nodes": tuple(nodes), "head": growth.head})
        elif tuple(nodes) != known.nodes:
            raise StorageError("new nodes of a finished episode")

    def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        if end.trajectory_id not in self.episodes:
            raise StorageError("an episode that nobody began")
        if self.is_open(end.trajectory_id):
            known = self.episodes[end.trajectory_id]
            parts = {name: value for name, value in end if name in Trajectory.model_fields}
            times = Times(started=known.times.started, finished=end.finished)
            self.episodes[known.id] = known.model_copy(update=parts | {"times": times})

    def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        gone = [each for each in trajectory_ids if self.is_open(each)]
        self.all_labels = {name: each for name, each in self.all_labels.items() if each.trajectory_id not in gone}
        self.episodes = {name: each for name, each in self.episodes.items() if name not in gone}
        self.all_scores = [each for each in self.all_scores if each.trajectory_id not in gone]
        return len(gone)

    def add_scores(self, scores: Sequence[Score]) -> None:
        """As in ``TrajectoryStorage``."""
        self.all_scores += scores

    def add_labels(self, labels: Sequence[Label]) -> None:
        """As in ``TakesLabels``."""
        for label in labels:
            self.all_labels.setdefault(label.id, label)

    def is_open(self, identity: str) -> bool:
        """Whether the episode is there and has not ended."""
        known = self.episodes.get(identity)
        return known is not None and known.stop is StopReason.UNFINISHED

    def find(self, where: TrajectoryFilter) -> Found:
        """As in ``TrajectoryStorage``, ``label`` aside."""
        pairs = [(each, self._scores(each.id)) for each in self.episodes.values()]
        found = [(summary_of(*pair), pair) for pair in pairs]
        found = [each for each in found if _matches(where, each[0])]
        if where.sort is TrajectoryOrder.STORED:
            found = found[::-1] if where.descending else found
        else:
            key = _KEYS[where.sort]
            known = [each for each in found if key(each[0]) is not None]
            known.sort(key=lambda each: key(each[0]) or 0.0, reverse=where.descending)
            found = known + [each for each in found if key(each[0]) is None]
        if where.after is not None:
            found = found[[each.id for each, _ in found].index(where.after) + 1 :]
        return [pair for _, pair in found[where.offset :][: where.limit]]

    def _scores(self, identity: str) -> tuple[Score, ...]:
        return tuple(score for score in self.all_scores if score.trajectory_id == identity)


def summary_of(trajectory: Trajectory, scores: Sequence[Score]) -> TrajectorySummary:
    """What a storage must say of an episode without its nodes."""
    newest, task = newest_outcome(scores), trajectory.task
    return TrajectorySummary(
        **{name: value for name, value in trajectory if name in TrajectorySummary.model_fields}
        | {
            "strategy": trajectory.strategy.name,
            "failure": trajectory.failure and trajectory.failure.kind,
            "nodes": len(trajectory.nodes),
        },
        task_id=task.id,
        environment=task.environment,
        split=task.split,
        turns=len(trajectory.acted()),
        episode_return=trajectory.known_return,
        reward=newest and newest.reward,
    )


def facts_of(each: TrajectorySummary) -> dict[str, Any]:
    """What filters compare."""
    policy = {
        "adapter": each.policy.adapter,
        "policy_version": each.policy.version,
        "base_model": each.policy.base_model,
    }
    return dict(each) | policy | {"failure_kind": each.failure}


def _matches(where: TrajectoryFilter, each: TrajectorySummary) -> bool:
    facts = facts_of(each)
    equal = ((facts[name], getattr(where, name)) for name in ("run_id", *_EQUAL, "failure_kind"))
    reward, finished, least, most = each.judged, each.times.finished, where.reward_at_least, where.reward_at_most
    bounds = ((least, reward), (reward, most), (where.since, finished), (finished, where.until))
    return (
        all(asked in (None, value) for value, asked in equal)
        and (where.ids is None or each.id in where.ids)
        and where.finished in (None, each.stop is not StopReason.UNFINISHED)
        and where.failed in (None, each.failure is not None)
        and (reward is not None or least is most is None)
        and all(low is None or high is None or low <= high for low, high in bounds)
        and (where.contains is None or any(where.contains in (facts[name] or "") for name in SEARCHED))
    )


class Check:
    """A storage beside the model of it."""

    def __init__(self, storage: TrajectoryStorage, model: Model | None = None) -> None:
        self.storage: Any = storage
        self.model = model or Model()
        self._reads_scores, self._takes_labels = isinstance(storage, ReadsScores), isinstance(storage, TakesLabels)

    async def do(self, *calls: Call) -> None:
        """Make calls of both, each twice where repeating it must change nothing, and compare what they hold then."""
        for name, given in calls:
            for _ in range(1 if name == "add_scores" else 2):
                expected, done = [await outcome(each, name, given) for each in (self.model, self.storage)]
                if isinstance(expected, StorageError) is not isinstance(done, StorageError):
                    _broken(f"{name}() of {_ids_of(given)} must raise StorageError, or must not: {expected or done}")
                if not isinstance(done, StorageError) and done != expected:
                    _broken(f"{name}() returned {done}, not {expected}")
                await self.compare(TrajectoryFilter(ids=_ids_of(given), finished=None), after=f"{name}(): ")

    async def compare(self, where: TrajectoryFilter, after: str = "") -> None:
        """Whether all methods that read say what those of the model say."""
        what = f"{after}find({where.model_dump(exclude_defaults=True)})"
        found, expected = [pair async for pair in self.storage.find(where)], self.model.find(where)
        if [one.id for one, _ in found] != (ids := [one.id for one, _ in expected]):
            _broken(f"{what} returned {[one.id for one, _ in found]}, not {ids}: in order, unknown rewards last")
        summaries = {each.id: each async for each in self.storage.summaries(where)}
        if [*summaries] != ids:
            _broken(f"{what}: summaries() must list what find() finds, in the same order")
        for (one, scores), (other, others) in zip(found, expected, strict=True):
            # When it last grew is the storage's own time.
            same = {"times"} if other.stop is StopReason.UNFINISHED else set[str]()
            if wrong := [name for name, value in other if name not in same and value != getattr(one, name)]:
                _broken(f"{what}: {one.id!r} has other {', '.join(wrong)} than were stored")
            alone = await self._scores(one.id) if self._reads_scores else others
            if scores != others or scores != alone:
                _broken(f"{what}: {one.id!r} must have the scores that were added, each once, oldest first")
            summary = summary_of(one, scores)
            if wrong := sorted(name for name, value in summary if getattr(summaries[one.id], name) != value):
                _broken(f"the summary of {one.id!r} does not say what the trajectory says: {', '.join(wrong)}")
        everything = where.model_copy(update={"offset": 0, "limit": None, "after": None})
        if await self.storage.count(where) != len(self.model.find(everything)):
            _broken(f"{what}: count() must count what find() finds, and leave offset and limit aside")
        labels = tuple(label for label in self.model.all_labels.values() if label.trajectory_id in (where.ids or ()))
        if self._takes_labels and await self.storage.labels(where.ids or ()) != labels:
            _broken(f"{what}: labels() must return the labels of these episodes, each once and oldest first")

    async def _scores(self, identity: str) -> tuple[Score, ...]:
        return (await self.storage.scores([identity, "nobody"])).get(identity, ())


async def check_storage(make: Callable[[], TrajectoryStorage]) -> None:
    """Write, read, filter, sort, score and reopen. Every ``make()`` opens the same store, which starts empty.

    Raises ``AssertionError`` with the rule that was broken.
    """
    check = Check(make())
    if [one async for one in check.storage.summaries(TrajectoryFilter(finished=None))]:
        _broken("the store that make() opens must be empty at the start")
    await check.do(*_operations(labels=isinstance(check.storage, TakesLabels)))
    await _check_depth(check)
    await _check_filters(check)
    await _check_together(check)
    # An unfinished episode goes on after a new start.
    steps = _calls(sample_episode("resumed"))
    await check.do(*steps[:3])
    await check.storage.close()
    check.storage = make()
    for run in ("run", "odd"):
        await check.compare(TrajectoryFilter(run_id=run, finished=None), "after close() and a new make(): ")
    await check.do(*steps[2:])
    await check.storage.close()


def _operations(*, labels: bool) -> Iterator[Call]:
    played, replaced, dropped = map(sample_episode, ("played", "replaced", "dropped"))
    nul, gap = sample_episode("nul\0"), EpisodeGrowth(trajectory_id="played", first=9, nodes=played.nodes[-1:])
    yield from _calls(played)[1:]  # which nobody began
    yield from (("add", nul), _calls(nul)[0], ("add", played.model_copy(update={"stop": StopReason.UNFINISHED})))
    for identity in ("1", "../2", "drei \N{HOT BEVERAGE}", "\N{OGHAM SPACE MARK}"):
        yield "add", sample_episode(identity)
        yield "add", sample_episode(identity).model_copy(update={"head": 1})
    for scores in ([], [sample_score("1", 0.25), sample_score("early", 0.5)], [sample_score("1", 0.75)]):
        yield "add_scores", scores
    yield "add", sample_episode("early")
    kinds = [*LabelKind, LabelKind.COMMENT] if labels else []
    made = [Label(id=f"{at}", trajectory_id=f"{at % 2}", kind=kind, at=0.0) for at, kind in enumerate(kinds)]
    yield from (("add_labels", some) for some in ([], made[:2], made) if labels)
    start, *growths, end = _calls(played)
    for call in (start, *growths):
        yield from (call, start, ("grow", gap))
    yield from (end, start, growths[-1], ("grow", gap.model_copy(update={"first": 6})))
    yield "add", played.model_copy(update={"evidence": {}})
    yield from _calls(sample_episode("replaced", text="another"))[:3]
    yield from (("add_scores", [sample_score("replaced", 0.125)]), ("add", replaced))
    yield from (*_calls(dropped)[:3], *_calls(sample_episode("kept"))[:3], ("drop", ["dropped", "nobody", "1"]))
    yield from _calls(dropped)


async def _check_depth(check: Check) -> None:
    value: Any = reduce(lambda inner, _: [inner], range(_DEEPER), "deep")
    deep = sample_episode("deep").model_copy(update={"evidence": {"deep": value}})
    with suppress(StorageError):
        await check.storage.add(deep)
        check.model.add(deep)
    try:
        await check.compare(TrajectoryFilter(ids=("deep",)))
    except StorageError as error:
        raise AssertionError("what is nested too deeply to be read back must be refused with StorageError") from error


async def _check_filters(check: Check) -> None:
    odd = [sample_episode(f"odd {name}", **{"run": "odd", **fields}) for name, fields in _ODD.items()]
    odd += [unrewarded(sample_episode(f"odd {name}", run="odd")) for name in ("unknown", "withdrawn")]
    # Neither a remark without a reward nor a verifier takes the place of an outcome; a failed episode has none.
    scores = (("return 0.0", 0.0), ("return 0.0", 1.0), ("withdrawn", 0.9), ("withdrawn", None), ("failed", 1.0))
    opinions = [sample_score("odd return 0.25", 0.0, "verifier-1@x"), sample_score("odd return 0.25", None, "remark-1")]
    await check.do(*(("add", one) for one in odd), *_calls(sample_episode("odd open", run="odd"))[:2])
    await check.do(("add_scores", [*(sample_score(f"odd {name}", reward) for name, reward in scores), *opinions]))
    asked = [*_ASKED]
    for name in _EQUAL:
        of = [facts_of(summary_of(one, ()))[name] for one in odd]
        asked += [{name: value} for value in dict.fromkeys(of) if value is not None]
    orders = [{"sort": sort, "descending": down} for sort in TrajectoryOrder for down in (False, True)]
    for fields in (*asked, *(order | page for order in orders for page in _PAGES)):
        await check.compare(TrajectoryFilter.model_validate({"run_id": "odd"} | fields))


async def _check_together(check: Check) -> None:
    """What is added while a stream is read is no part of it; what is stored at the same time is there."""
    first = [("add", sample_episode(f"first {at}", run="together")) for at in range(20)]
    await check.do(*first)
    seen: list[str] = []
    async for trajectory, _ in check.storage.find(TrajectoryFilter(run_id="together")):
        seen.append(trajectory.id)
        if len(seen) < _CONCURRENCY:
            await check.do(("add", sample_episode(f"later {len(seen)}", run="together")))
    if seen != [one.id for _, one in first]:
        _broken("what is added while a stream is read must not be part of it")

    async def work(calls: Sequence[Call]) -> None:
        for call in calls:
            await outcome(check.storage, *call)

    jobs = [[("add", sample_episode("whole", run="at once"))]] * 3
    for at in range(_CONCURRENCY):
        one = sample_episode(f"at once {at}", run="at once", text="x" * at)
        jobs.append([*_calls(one), ("add_scores", [sample_score(one.id, 0.5)])])
    await asyncio.gather(*map(work, jobs))
    for calls in jobs:
        for call in calls:
            await outcome(check.model, *call)
        await check.compare(TrajectoryFilter(ids=_ids_of(calls[0][1])), "at the same time: ")


def _calls(sample: Trajectory) -> list[Call]:
    """How the episode is stored step by step."""
    names = {EpisodeStart: "begin", EpisodeGrowth: "grow", EpisodeEnd: "end"}
    return [(names[type(step)], step) for step in steps_of(sample)]


def _ids_of(given: Any) -> tuple[str, ...]:
    """The episodes that a call is about."""
    every = given if isinstance(given, list) else [given]
    return tuple(each if isinstance(each, str) else getattr(each, "trajectory_id", None) or each.id for each in every)


async def outcome(of: Any, name: str, given: Any) -> Any:
    """What a call returns, or the ``StorageError`` that it raises."""
    try:
        result = getattr(of, name)(given)
        return await result if isinstance(result, Awaitable) else result
    except StorageError as error:
        return error


def _broken(rule: str) -> NoReturn:
    raise AssertionError(rule)
