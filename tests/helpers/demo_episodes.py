"""Episodes of one turn, as a demo's report shows them."""

from __future__ import annotations

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Message,
    Observation,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)


def demo_episode(stage: str, goal: str, earned: float, *, asked: str, text: str, policy: PolicyRef) -> Trajectory:
    """An attempt at ``goal`` in the evaluation ``stage`` of the run ``run``, with a return of ``earned``."""
    tree = EpisodeTree()
    tree.observe(Observation(messages=(Message(role="user", content=asked),)))
    tree.commit(tree.propose(Completion(message=Message(role="assistant", content=text), policy=policy)))
    tree.observe(Observation(messages=(Message(role="user", content="Bye."),), reward=earned, terminated=True))
    return tree.freeze(
        EpisodeRequest(task=Task(id=goal, environment="webshop"), run_id=f"run/evaluate-{stage}", group_id=goal),
        trajectory_id=f"{stage}-{len(goal)}-{hash(goal)}",
        strategy=StrategySpec(name="StandardReAct"),
        policy=policy,
        stop=StopReason.TERMINATED,
        times=Times(started=0.0, finished=1.0),
    )
