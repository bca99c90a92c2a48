"""Trajectories for the storage tests, built through the same tree as real ones."""

from __future__ import annotations

from collections.abc import Iterable

from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    Message,
    Observation,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    Trajectory,
    Usage,
)


def trajectory(
    identity: str,
    *,
    run_id: str = "run",
    group_id: str = "group",
    environment: str = "webshop",
    task_id: str = "goal-1",
    split: str = "train",
    strategy: str = "StandardReAct",
    version: int | None = 7,
    reward: float = 0.5,
    stop: StopReason = StopReason.TERMINATED,
    failure: Failure | None = None,
    finished: float = 1_763_700_002.0,
    turns: int = 1,
    new_tokens: int = 8,
) -> Trajectory:
    """``turns`` turns with ``new_tokens`` new tokens each, half of them sampled with a logprob."""
    task = Task(id=task_id, environment=environment, instruction="Buy a red mug.", split=split)
    policy = PolicyRef(base_model="smollm2-135m", adapter=None if version is None else "shop", version=version)
    tree = EpisodeTree()
    tree.observe(Observation(messages=(Message(role="user", content="Buy a red mug. \N{HOT BEVERAGE}"),)))
    context: tuple[int, ...] = ()
    for turn in range(turns):
        prompt = context + tuple(1000 + 7 * at % 40_000 for at in range(new_tokens - new_tokens // 2))
        sampled = tuple(3000 + 11 * at % 40_000 for at in range(new_tokens // 2))
        tokens = Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=tuple(-at / 977 for at in range(len(sampled))))
        action = Message(role="assistant", content='search["red mug"]\n')
        completion = Completion(
            message=action,
            tokens=tokens,
            finish_reason="stop",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled), calls=1),
            policy=policy,
            sampling=SamplingParams(temperature=1.0, seed=3),
        )
        tree.commit(tree.propose(completion))
        last = turn == turns - 1
        answer = Message(role="user", content="Results: 3 mugs.")
        tree.observe(Observation(messages=(answer,), reward=reward if last else 0.0, terminated=last))
        context = prompt + sampled
    return tree.freeze(
        EpisodeRequest(task=task, run_id=run_id, group_id=group_id),
        trajectory_id=identity,
        strategy=StrategySpec(name=strategy),
        policy=policy,
        stop=stop,
        times=Times(started=finished - 2.0, finished=finished),
        evidence={"bought": "mug-3", "options": {"colour": "red"}},
        failure=failure,
    )


async def play(storage: TrajectoryStorage, steps: Iterable[EpisodeStart | EpisodeGrowth | EpisodeEnd]) -> None:
    """Store an episode, or a part of one, as it runs."""
    for step in steps:
        if isinstance(step, EpisodeStart):
            await storage.begin(step)
        elif isinstance(step, EpisodeGrowth):
            await storage.grow(step)
        else:
            await storage.end(step)
