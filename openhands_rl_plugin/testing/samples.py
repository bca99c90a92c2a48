"""Small episodes for the conformance suite of storages, whole and in the steps in which they are played."""

from __future__ import annotations

from functools import partial

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


def unrewarded(sample: Trajectory) -> Trajectory:
    """The episode, no step of which was rewarded."""
    nodes = tuple(node.model_copy(update={"reward": None}) for node in sample.nodes)
    return sample.model_copy(update={"nodes": nodes})
