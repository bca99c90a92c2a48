"""Small episodes for the conformance suite of storages, whole and in the steps in which they are played."""

from __future__ import annotations

from collections.abc import Iterator

from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, NodeMark
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
    run: str = "run",
    group: str = "group",
    task: str = "task",
    environment: str = "grid",
    split: str = "train",
    strategy: str = "StandardReAct",
    policy: PolicyRef = _POLICY,
    stop: StopReason = StopReason.TERMINATED,
    failure: Failure | None = None,
    reward: float = 0.5,
    finished: float = 2000.0,
    text: str = "",
) -> Trajectory:
    """Two turns, a sibling that was not acted, tokens with odd logprobs, and ``reward`` as the return."""
    call = ToolCall(id="call-1", name="search", arguments='{"query": "\\u2615",\n}')
    first = Tokens.of((1, 2, 70_000), (3, 4), (-0.1, -0.0))
    second = Tokens.of((5,), (6, 2**32 - 1), (-1e-45, -0.5), extends=True)
    nodes = (
        Node(parent=None, message=Message(role="system", content=f"You walk. \N{HOT BEVERAGE} {text}")),
        _answer(0, call, first, policy, reward=-0.25),
        _answer(0, call, None, policy, value=0.125, visits=3),
        Node(parent=1, message=Message(role="tool", content="a\u0000b\r\n", tool_call_id="call-1", name="search")),
        _answer(3, call, second, policy, reward=reward + 0.25),
        Node(parent=4, message=Message(role="user", content="")),
    )
    return Trajectory(
        id=identity,
        run_id=run,
        group_id=group,
        task=Task(id=task, environment=environment, instruction="Walk.", data={"goal": [1, None]}, split=split),
        strategy=StrategySpec(name=strategy, options={"width": 2}),
        policy=policy,
        nodes=nodes,
        head=5,
        stop=stop,
        tools=(_TOOL,),
        evidence={"steps": 2, "text": text},
        failure=failure,
        usage=Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=4, calls=3, steps=2),
        times=Times(started=finished - 2.5, finished=finished),
    )


def _answer(
    parent: int,
    call: ToolCall,
    tokens: Tokens | None,
    policy: PolicyRef,
    *,
    reward: float | None = None,
    value: float | None = None,
    visits: int = 0,
) -> Node:
    return Node(
        parent=parent,
        message=Message(role="assistant", tool_calls=(call,)),
        sampled=True,
        tokens=tokens,
        policy=policy,
        sampling=SamplingParams(temperature=1.0),
        finish_reason="tool_calls",
        reward=reward,
        value=value,
        visits=visits,
        metadata={"response": {"id": "answer", "cost": 0.1}},
    )


def steps_of(sample: Trajectory) -> tuple[Step, ...]:
    """How ``sample`` is stored while it is played: the reward of an answer is known one growth after the answer."""
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


FILTERS: tuple[tuple[dict[str, object], set[str]], ...] = (
    ({"run_id": "filter other"}, {"filter run"}),
    ({"run_id": "no such run"}, set()),
    ({"group_id": "other"}, {"filter group"}),
    ({"task_id": "../task"}, {"filter task"}),
    ({"environment": "other"}, {"filter environment"}),
    ({"split": "held-out"}, {"filter split"}),
    ({"strategy": "Other"}, {"filter strategy"}),
    ({"adapter": "other"}, {"filter adapter"}),
    ({"policy_version": 8}, {"filter version"}),
    ({"stop": StopReason.MAX_TURNS}, {"filter stop"}),
    ({"failed": True}, {"filter infrastructure", "filter grader"}),
    ({"failed": False}, {"filter infrastructure", "filter grader"}),
    ({"failure_kind": FailureKind.GRADER}, {"filter grader"}),
    ({"finished": False}, {"filter open"}),
    ({"stop": StopReason.UNFINISHED, "finished": None}, {"filter open"}),
    ({"finished": None, "adapter": "shop", "policy_version": 7, "strategy": "Other"}, {"filter strategy"}),
    ({"reward_at_least": 0.75}, {"filter return", "filter scored", "filter opinion"}),
    ({"reward_at_most": 0.25}, {"filter low"}),
    ({"reward_at_least": 0.875, "reward_at_most": 0.875}, {"filter return"}),
    ({"since": 2000.5}, {"filter late"}),
    ({"until": 1999.5}, {"filter early"}),
    ({"since": 1990.0, "until": 1990.0}, {"filter early"}),
    ({"ids": ("filter late", "filter run", "nobody", "filter late")}, {"filter late"}),
    ({"ids": ()}, set()),
    ({"contains": "r in"}, {"filter infrastructure"}),
    ({"contains": "../t"}, {"filter task"}),
    ({"contains": "r IN"}, set()),
)


def one_of_each() -> Iterator[Trajectory]:
    """Episodes of which each differs from the others in one thing, which is its name."""
    grader = GONE.model_copy(update={"kind": FailureKind.GRADER})
    yield sample_episode("filter run", run="filter other")
    yield sample_episode("filter group", run="filter", group="other")
    yield sample_episode("filter task", run="filter", task="../task")
    yield sample_episode("filter environment", run="filter", environment="other")
    yield sample_episode("filter split", run="filter", split="held-out")
    yield sample_episode("filter strategy", run="filter", strategy="Other")
    yield sample_episode("filter adapter", run="filter", policy=_POLICY.model_copy(update={"adapter": "other"}))
    yield sample_episode("filter version", run="filter", policy=_POLICY.model_copy(update={"version": 8}))
    yield sample_episode("filter base", run="filter", policy=PolicyRef(base_model="base"))
    yield sample_episode("filter stop", run="filter", stop=StopReason.MAX_TURNS)
    yield sample_episode("filter infrastructure", run="filter", stop=StopReason.ERROR, failure=GONE)
    yield sample_episode("filter grader", run="filter", stop=StopReason.ERROR, failure=grader)
    yield sample_episode("filter return", run="filter", reward=0.875)
    yield sample_episode("filter scored", run="filter", reward=0.0)
    yield sample_episode("filter low", run="filter", reward=0.25)
    yield unrewarded(sample_episode("filter unknown", run="filter"))
    yield sample_episode("filter opinion", run="filter", reward=0.25)
    yield sample_episode("filter late", run="filter", finished=2010.0)
    yield sample_episode("filter early", run="filter", finished=1990.0)


def rewardless(run: str) -> Iterator[Trajectory]:
    """Episodes without a reward: one that failed after it was rewarded, and one in which no step was."""
    yield sample_episode(f"{run} failed", run=run, stop=StopReason.ERROR, failure=GONE)
    yield unrewarded(sample_episode(f"{run} plain", run=run))


def unrewarded(sample: Trajectory) -> Trajectory:
    """The episode, no step of which was rewarded."""
    nodes = tuple(node.model_copy(update={"reward": None}) for node in sample.nodes)
    return sample.model_copy(update={"nodes": nodes})
