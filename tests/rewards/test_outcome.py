from __future__ import annotations

import pytest

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.types import Node, StopReason, Trajectory
from openhands_rl_plugin.rewards.outcome import (
    BonusOptions,
    ReturnReward,
    SuccessBonusReward,
    SuccessOptions,
    SuccessReward,
)
from openhands_rl_plugin.testing import check_reward, example_trajectory


def with_rewards(*rewards: float | None, stop: StopReason = StopReason.MAX_TURNS) -> Trajectory:
    """The example with its executed actions' rewards replaced (and as many of them as rewards are given)."""
    example = example_trajectory(1)
    opening, action, state = example.nodes[0], example.nodes[1], example.nodes[3]
    nodes: list[Node] = [opening]
    for reward in rewards:
        nodes.append(action.model_copy(update={"parent": len(nodes) - 1, "reward": reward}))
        if reward is not None:
            nodes.append(state.model_copy(update={"parent": len(nodes) - 1}))
    return example.model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1, "stop": stop})


@pytest.mark.parametrize("reward", [ReturnReward(), SuccessReward(), SuccessReward(SuccessOptions(threshold=0.5))])
async def test_they_keep_the_rules_of_rewards(reward: ReturnReward | SuccessReward):
    await check_reward(reward, [example_trajectory(at) for at in range(3)])


@pytest.mark.parametrize(
    ("rewards", "threshold", "expected"),
    [((0.99,), 1.0, 0.0), ((1.0,), 1.0, 1.0), ((0.1,) * 10, 1.0, 1.0), ((0.4, 0.1), 0.5, 1.0), ((-1.0,), 0.0, 0.0)],
)
async def test_success_is_reaching_the_threshold(rewards: tuple[float, ...], threshold: float, expected: float):
    score = await SuccessReward(SuccessOptions(threshold=threshold))(with_rewards(*rewards))
    assert score.reward == expected


@pytest.mark.parametrize("reward", [SuccessReward(), SuccessBonusReward(BonusOptions(share=1.0))])
async def test_without_a_threshold_success_is_the_environments(reward: SuccessReward | SuccessBonusReward):
    solved = with_rewards(0.72, stop=StopReason.TERMINATED)
    tasks = [solved.task.model_copy(update={"environment": name}) for name in ("gymnasium/BabyAI-GoTo-v0", "webshop")]
    scores = [await reward(solved.model_copy(update={"task": task})) for task in tasks]
    assert [score.reward for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize("reward", [ReturnReward(), SuccessReward(SuccessOptions(threshold=0.0))])
@pytest.mark.parametrize(
    ("trajectory", "reason"),
    [
        (example_trajectory(3), "failed .infrastructure.: the server went away"),
        (with_rewards(stop=StopReason.TIMEOUT), "no executed action .timeout."),
        (with_rewards(0.5, None, stop=StopReason.TIMEOUT), "an action that got no answer .timeout."),
    ],
    ids=["failed", "nothing executed", "no answer"],
)
async def test_what_cannot_be_judged_gets_no_number(
    reward: ReturnReward | SuccessReward, trajectory: Trajectory, reason: str
):
    with pytest.raises(GraderError, match=reason):
        await reward(trajectory)


async def test_the_success_bonus_lifts_only_what_reaches_the_threshold() -> None:
    trajectory = example_trajectory().model_copy(update={"failure": None})
    total = (await ReturnReward()(trajectory)).reward
    assert total is not None
    reached = await SuccessBonusReward(BonusOptions(threshold=total, share=0.25))(trajectory)
    missed = await SuccessBonusReward(BonusOptions(threshold=total + 1, share=0.25))(trajectory)
    assert reached.reward == pytest.approx(0.75 * total + 0.25)
    assert missed.reward == pytest.approx(0.75 * total)
    assert reached.reward_version != missed.reward_version
