"""The conformance check of storages, ``testing.check_storage``, and the small episodes that it stores, whole and in the
steps in which they are rolled out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryDirectory
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
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import (
    Failure,
    FailureKind,
    JsonObject,
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
    run: str = "run",
    group: str = "group",
    task: str = "task",
    environment: str = "grid",
    split: str = "train",
    strategy: str = "StandardReAct",
    stop: StopReason = StopReason.TERMINATED,
    failure: Failure | None = None,
) -> Trajectory:
    """Two turns, a sibling that was not acted, tokens with odd logprobs, and ``reward`` as the return."""
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
    data: JsonObject = {"goal": [1, None]}
    return Trajectory(
        id=identity,
        run_id=run,
        group_id=group,
        task=Task(id=task, environment=environment, instruction="Walk.", data=data, split=split),
        strategy=StrategySpec(name=strategy, options={"width": 2}),
        policy=policy,
        nodes=nodes,
        head=5,
        stop=stop,
        tools=({"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}},),
        evidence={"steps": 2, "text": text},
        failure=failure,
        usage=Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=4, calls=3, steps=2),
        times=Times(started=finished - 2.5, finished=finished),
    )


def example_trajectory(at: int = 0) -> Trajectory:
    """A short, valid trajectory of a grid episode; ``at`` % 4 == 3 is one that failed.

    Others end at the goal when ``at`` is even and at the limit of turns when it is odd.
    """
    failed, arrived = at % 4 == 3, at % 2 == 0
    return sample_episode(
        f"00000000-0000-4000-8000-{at:012d}",
        policy=PolicyRef(base_model="scripted"),
        reward=float(arrived),
        finished=1005.0 + 10 * at,
        group=f"group-{at // 2}",
        task=f"grid-{at}",
        stop=StopReason.ERROR if failed else StopReason.TERMINATED if arrived else StopReason.MAX_TURNS,
        failure=GONE if failed else None,
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


# What an episode has that no other one has (the arguments of the sample), and what finds it.
_ODD: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *(({name: f"../other {name}"}, {f"{name}_id": f"../other {name}"}) for name in ("group", "task")),
    *(({name: f"../other {name}"}, {name: f"../other {name}"}) for name in ("environment", "split", "strategy")),
    ({"policy": PolicyRef(base_model="other", adapter="other", version=8)}, {"adapter": "other", "policy_version": 8}),
    ({"stop": StopReason.MAX_TURNS}, {"stop": StopReason.MAX_TURNS}),
    ({"stop": StopReason.ERROR, "failure": GONE, "reward": 9.0}, {"failed": True}),
    ({"reward": 0.875}, {"reward_at_least": 0.75}),
    ({"reward": -9.0}, {"reward_at_most": 0.25}),
    ({"finished": 2010.0}, {"since": 2010.0}),
    ({"finished": 1990.0}, {"until": 1999.0}),
)
_ASKED: tuple[dict[str, Any], ...] = (
    *(asked for _, asked in _ODD),
    *({"contains": "ther t"}, {"label": "good"}, {"finished": False}, {"ids": ("judged", "nobody")}, {"limit": 0}),
    *({"sort": sort, "offset": 1, "limit": 9} for sort in TrajectoryOrder),
)


def _operations() -> Iterator[tuple[str, Any]]:
    """The methods that are called, in order, and what they are given; after ``close`` the store is opened anew."""
    sample = sample_episode("judged")
    start, *growths, end = steps_of(sample)
    yield from (("grow", growths[0]), ("end", end))  # nobody began it
    for name, step in (("begin", start), *(("grow", each) for each in growths), ("end", end)):
        yield from ((name, step), (name, step), ("grow", growths[-1].model_copy(update={"first": 9})), ("close", None))
    yield "add", sample.model_copy(update={"head": 1})
    yield from (("begin", EpisodeStart.of(sample_episode(name))) for name in ("replaced", "dropped", "open"))
    yield "add_scores", [sample_score("dropped", 0.125)]
    yield "add", sample_episode("replaced")
    yield "drop", ["dropped", "nobody", "judged"]
    yield from (("add_scores", [sample_score("judged", reward)]) for reward in (0.25, 0.25, 0.75))
    label = Label(id="1", trajectory_id="judged", kind=LabelKind.TAG, text="good", at=0.0)
    yield from (("add_labels", [label]), ("add_labels", [label]))
    yield from (("add", sample_episode(f"odd {at}", **given)) for at, (given, _) in enumerate(_ODD))
    yield "add", unrewarded(sample_episode("unknown"))
    yield "close", None


async def check_storage(make: Callable[[], TrajectoryStorage]) -> None:
    """Write, read, filter, sort, score and reopen, as ``FileTrajectoryStorage`` does it.

    Every ``make()`` opens the same store, which starts empty. Raises ``AssertionError`` that names what differs.
    """
    from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

    everything = TrajectoryFilter(finished=None)
    with TemporaryDirectory() as folder:
        storage, other = make(), FileTrajectoryStorage(folder, durable=False)
        assert not await storage.count(everything), "the store must be empty at the start"
        for name, given in _operations():
            result, wanted = [await _outcome(each, name, given) for each in (storage, other)]
            assert result == wanted, f"{name}({given!s:.200}) returned or raised {result}, not {wanted}"
            if name == "close":
                storage, other = make(), FileTrajectoryStorage(folder, durable=False)
            await _compare(storage, other, everything, f"after {name}(), ")
        for asked in _ASKED:
            await _compare(storage, other, TrajectoryFilter.model_validate({"finished": None, **asked}), "")
        await asyncio.gather(storage.close(), other.close())


async def _outcome(storage: TrajectoryStorage, name: str, given: Any) -> Any:
    try:
        return await getattr(storage, name)(*([] if name == "close" else [given]))
    except StorageError:
        return StorageError


async def _compare(storage: TrajectoryStorage, other: TrajectoryStorage, where: TrajectoryFilter, when: str) -> None:
    what, (found, wanted) = (
        f"{when}{where.model_dump(exclude_defaults=True)}",
        [[one async for one in each.find(where)] for each in (storage, other)],
    )
    ids, others = [[one.id for one, _ in each] for each in (found, wanted)]
    assert ids == others, f"{what}: find() found {ids}, not {others}"
    for (one, scores), (expected, judged) in zip(found, wanted, strict=True):
        # An unfinished episode has the time at which it grew.
        wrong = [
            name for name, value in expected if value != getattr(one, name) and (name != "times" or not _open(one))
        ]
        assert not wrong, f"{what}: {one.id!r} has other {', '.join(wrong)} than were stored"
        assert scores == judged, f"{what}: {one.id!r} has the scores {scores}, not {judged}"
    listed, known = [
        [each.model_copy(update={"times": None} if _open(each) else {}) async for each in one.summaries(where)]
        for one in (storage, other)
    ]
    assert listed == known, f"{what}: summaries() listed {listed}, not {known}"
    for name, given in (("count", where), ("scores", ids), ("labels", ids)):
        result, expected = [await getattr(each, name)(given) for each in (storage, other)]
        assert result == expected, f"{what}: {name}() returned {result}, not {expected}"


def _open(episode: Trajectory | TrajectorySummary) -> bool:
    return episode.stop is StopReason.UNFINISHED
