"""The conformance suite of storages, ``testing.check_storage``, and the small episodes that it stores, whole and in the
steps in which they are rolled out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
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
from openhands_rl_plugin.core.types import (
    Failure,
    FailureKind,
    Message,
    Node,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
    Usage,
)

Step = EpisodeStart | EpisodeGrowth | EpisodeEnd

_POLICY = PolicyRef(base_model="base", adapter="shop", version=7)
GONE = Failure(kind=FailureKind.INFRASTRUCTURE, message="the server went away", boundary="environment.step")
"""Why the failed samples failed."""

_TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}

# The nodes that belong together: asked and answered (with a sibling that was not acted), seen and answered, seen.
_CUTS = (0, 3, 5, 6)


def sample_score(trajectory_id: str, reward: float | None, version: str = "test-1") -> Score:
    """A judgement of one of the episodes."""
    return Score(trajectory_id=trajectory_id, reward=reward, reward_version=version, detail={"why": "\N{HOT BEVERAGE}"})


def sample_episode(
    identity: str,
    *,
    policy: PolicyRef = _POLICY,
    reward: float = 0.5,
    finished: float = 2000.0,
    text: str = "",
    **about: Any,
) -> Trajectory:
    """Two turns, a sibling that was not acted, tokens with odd logprobs, and ``reward`` as the return. ``about``: its
    run, group, task, environment, split, strategy, stop and failure."""
    known = {
        "environment": "grid",
        "split": "train",
        "strategy": "StandardReAct",
        "stop": StopReason.TERMINATED,
    } | about
    call = ToolCall(id="call-1", name="search", arguments='{"query": "\\u2615",\n}')
    first = Tokens.of((1, 2, 70_000), (3, 4), (-0.1, -0.0))
    second = Tokens.of((5,), (6, 2**32 - 1), (-1e-45, -0.5), extends=True)
    answer = partial(
        Node,
        message=Message(role="assistant", tool_calls=(call,)),
        sampled=True,
        policy=policy,
        sampling=SamplingParams(temperature=1.0),
        finish_reason="tool_calls",
        metadata={"response": {"id": "answer", "cost": 0.1}},
    )
    nodes = (
        Node(parent=None, message=Message(role="system", content=f"You walk. \N{HOT BEVERAGE} {text}")),
        answer(parent=0, tokens=first, reward=-0.25),
        answer(parent=0, value=0.125, visits=3),
        Node(parent=1, message=Message(role="tool", content="a\u0000b\r\n", tool_call_id="call-1", name="search")),
        answer(parent=3, tokens=second, reward=reward + 0.25),
        Node(parent=4, message=Message(role="user", content="")),
    )
    return Trajectory(
        id=identity,
        run_id=known.get("run", "run"),
        group_id=known.get("group", "group"),
        task=Task(
            id=known.get("task", "task"),
            environment=known["environment"],
            instruction="Walk.",
            data={"goal": [1, None]},
            split=known["split"],
        ),
        strategy=StrategySpec(name=known["strategy"], options={"width": 2}),
        policy=policy,
        nodes=nodes,
        head=5,
        stop=known.get("stop", StopReason.TERMINATED),
        tools=(_TOOL,),
        evidence={"steps": 2, "text": text},
        failure=known.get("failure"),
        usage=Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=4, calls=3, steps=2),
        times=Times(started=finished - 2.5, finished=finished),
    )


def steps_of(sample: Trajectory) -> tuple[Step, ...]:
    """How ``sample`` is stored while it runs: the reward of an answer is known one growth after the answer."""
    growths = (
        EpisodeGrowth(
            trajectory_id=sample.id,
            first=first,
            nodes=tuple(node.model_copy(update={"reward": None}) for node in sample.nodes[first:until]),
            head=1 if first == 0 else until - 1,
            marks=() if first == 0 else (NodeMark(index=acted, reward=sample.nodes[acted].reward),),
        )
        for first, until, acted in zip(_CUTS, _CUTS[1:], (0, 1, 4), strict=False)
    )
    return (EpisodeStart.of(sample), *growths, EpisodeEnd.of(sample))


def unrewarded(sample: Trajectory) -> Trajectory:
    """The episode, no step of which was rewarded."""
    nodes = tuple(node.model_copy(update={"reward": None}) for node in sample.nodes)
    return sample.model_copy(update={"nodes": nodes})


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
    assert not await storage.count(TrajectoryFilter(finished=None)), "the store must be empty at the start"
    await _check_steps(storage)
    await _check_judgements(storage)
    await _check_filters(storage)
    # What is added while a stream is read is no part of it; what is stored at the same time is there.
    samples, seen = [sample_episode(f"at once {at}", run="together") for at in range(20)], list[str]()
    await asyncio.gather(*(_store(storage, *steps_of(one)) for one in samples))
    async for trajectory, _ in storage.find(TrajectoryFilter(run_id="together")):
        seen.append(trajectory.id)
        await storage.add(sample_episode(f"later {len(seen)}", run="together"))
    assert sorted(seen) == sorted(one.id for one in samples), "what several callers store at once must all be found"
    # An unfinished episode goes on after a new start.
    sample = sample_episode("resumed")
    start, first, *others = steps_of(sample)
    await _store(storage, start, first)
    await storage.close()
    storage = make()
    left = await storage.count(TrajectoryFilter(ids=(sample.id,), finished=False))
    assert left, "an unfinished episode must be there after close() and a new make()"
    await _store(storage, *others)
    await _expect(storage, TrajectoryFilter(ids=(sample.id,)), [sample])
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
        found = [one.stop is StopReason.UNFINISHED async for one, _ in storage.find(where)]
        assert found == [step is not end], "an episode must be one, and unfinished until end()"
    await storage.add(other)
    await _expect(storage, where, [sample])
    value: Any = reduce(lambda inner, _: [inner], range(_DEEPER), "deep")
    for changes, what in (
        ({"id": "nul\0"}, "an id with a NUL character"),
        ({"id": "new", "stop": StopReason.UNFINISHED}, "an unfinished episode"),
        ({"id": "deep", "evidence": {"deep": value}}, "what is nested too deeply to be read back"),
    ):
        await _refused(storage, "add", sample.model_copy(update=changes), what)
    replaced, dropped = sample_episode("replaced"), sample_episode("dropped")
    for one in (replaced, dropped):
        await _store(storage, *steps_of(one)[:2])
        await storage.add_scores([sample_score(one.id, 0.125)])
    await storage.add(replaced)
    gone = await storage.drop(["dropped", "nobody", "in steps"])
    assert gone == 1, f"drop() returned {gone}, not 1: it deletes unfinished episodes only"
    await _expect(storage, TrajectoryFilter(ids=("replaced", "dropped"), finished=None), [replaced])
    assert not await storage.scores(["dropped"]), "drop() must delete the scores of the episode, too"


async def _check_judgements(storage: TrajectoryStorage) -> None:
    judged, ids = sample_episode("judged"), ["judged", "nobody"]
    scores = (sample_score("judged", 0.25), sample_score("judged", 0.25), sample_score("judged", 0.75))
    await storage.add_scores(scores[:2])
    await storage.add(judged)
    await storage.add_scores(scores[2:])
    found = [(one, given) async for one, given in storage.find(TrajectoryFilter(ids=("judged",)))]
    same = found == [(judged, scores)] and dict(await storage.scores(ids)) == {"judged": scores}
    assert same, "an episode must have the scores that were added, each once, oldest first"
    label = Label(id="1", trajectory_id="judged", kind=LabelKind.TAG, text="good", at=0.0)
    for _ in range(2):
        await storage.add_labels([label])
    assert await storage.labels(ids) == (label,), "labels() must return the labels of these episodes, each once"
    await _expect(storage, TrajectoryFilter(label="good"), [judged])


async def _check_filters(storage: TrajectoryStorage) -> None:
    usual, unknown = sample_episode("usual", run="odd"), unrewarded(sample_episode("unknown", run="odd"))
    odd = [sample_episode(f"odd {at}", run="odd", **given) for at, (given, _) in enumerate(_ODD)]
    everything = [usual, *odd, unknown]
    for each in everything:
        await storage.add(each)
    await _store(storage, *steps_of(sample_episode("open", run="odd"))[:2])
    for one, (_, asked) in zip(odd, _ODD, strict=True):
        await _expect(storage, TrajectoryFilter(run_id="odd", **asked), [one])
    await _expect(storage, TrajectoryFilter(contains="ther t"), [odd[1]])
    # Unknown rewards come last.
    by_reward = sorted(everything, key=lambda each: (each.known_return is None, each.known_return or 0.0))
    for order, listed in ((TrajectoryOrder.STORED, everything), (TrajectoryOrder.REWARD, by_reward)):
        for page in ({}, {"offset": 1, "limit": 3}, {"limit": 0}):
            where = TrajectoryFilter.model_validate({"run_id": "odd", "sort": order, **page})
            await _expect(storage, where, listed[where.offset :][: where.limit], count=len(listed))


async def _store(storage: TrajectoryStorage, *steps: Any) -> None:
    for step in steps:
        await getattr(storage, _METHODS[type(step).__name__])(step)


async def _refused(storage: TrajectoryStorage, name: str, given: Any, what: str) -> None:
    try:
        await getattr(storage, name)(given)
    except StorageError:
        return
    raise AssertionError(f"{name}() must raise StorageError for {what}")


async def _expect(
    storage: TrajectoryStorage, where: TrajectoryFilter, wanted: Sequence[Trajectory], count: int | None = None
) -> None:
    """Whether all methods that read find these episodes."""
    what = f"find({where.model_dump(exclude_defaults=True)})"
    found = [one async for one, _ in storage.find(where)]
    ids, others = [one.id for one in wanted], [one.id for one in found]
    assert others == ids, f"{what} returned {others}, not {ids}"
    for one, other in zip(found, wanted, strict=True):
        wrong = [name for name, value in other if value != getattr(one, name)]
        assert not wrong, f"{what}: {one.id!r} has other {', '.join(wrong)} than were stored"
    listed = [(each.id, each.turns, each.usage, each.times) async for each in storage.summaries(where)]
    same = listed == [(each.id, len(each.acted()), each.usage, each.times) for each in wanted]
    assert same, f"{what}: summaries() must list what find() finds, in the same order, and say the same of it"
    counted = await storage.count(where) == (len(wanted) if count is None else count)
    assert counted, f"{what}: count() must count what find() finds, and leave offset and limit aside"
