"""Which judgement of an episode is its reward, and what an episode without any says."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.types import Node, Score, Task, Trajectory
from openhands_rl_plugin.rewards.outcome import RecordedReward, ReturnReward, SuccessOptions, SuccessReward
from openhands_rl_plugin.rollout.scoring import known_score
from openhands_rl_plugin.testing import check_reward, example_trajectory


def score(version: str, reward: float | None) -> Score:
    return Score(trajectory_id="x", reward=reward, reward_version=version)


def session(**changes: object) -> Trajectory:
    """An ordinary run in a workspace: every step was answered but the last one, ``finish``."""
    made = example_trajectory()
    last = max(made.path(), key=lambda at: made.nodes[at].sampled * at)
    nodes: list[Node] = []
    for at, node in enumerate(made.nodes[: last + 1]):
        reward = 0.0 if node.sampled and at != last else None
        nodes.append(node.model_copy(update={"reward": reward}))
    update = {"task": Task(id="s", environment="workspace"), "nodes": tuple(nodes), "head": last, "evidence": {}}
    return made.model_copy(update=update | changes)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], None),
        ([score("tests-1", 1.0)], 1.0),
        ([score("tests-1", 1.0), score("verifier-1@a", 0.1)], 1.0),
        ([score("tests-1", 1.0), score("verdict-1", 0.0)], 0.0),
        ([score("tests-1", 1.0), score("verdict-1", 0.0), score("verdict-1", None)], 1.0),
        ([score("verifier-1@a", 0.9)], None),
        ([score("tests-1", None)], None),
    ],
)
def test_the_newest_judgement_of_the_outcome(scores: list[Score], expected: float | None) -> None:
    newest = newest_outcome(scores)
    assert (newest and newest.reward) == expected
    known = known_score(RecordedReward(), session(), scores)
    assert (known and known.reward) == expected


async def test_an_ordinary_run_that_nobody_judged_has_no_reward_and_says_how_to_give_one() -> None:
    run = session()
    assert run.known_return is None
    assert session(task=Task(id="x", environment="swe"), evidence={"git_patch": ""}).known_return is None
    for reward in (RecordedReward(), ReturnReward(), SuccessReward()):
        with pytest.raises(GraderError, match="say one: openhands-rl score STORE --id ID --value 1"):
            await reward(run)
        assert known_score(reward, run, ()) is None


def test_what_was_told_is_the_return_where_the_environment_pays_nothing() -> None:
    told = [score("gateway-1", 0.7)]
    assert known_score(ReturnReward(), session(), told) == Score(
        trajectory_id=session().id, reward=0.7, detail={"judged_by": "gateway-1"}, reward_version="return-1"
    )
    success = known_score(SuccessReward(SuccessOptions(threshold=0.5)), session(), told)
    assert success is not None and success.reward == 1.0
    assert known_score(ReturnReward(), example_trajectory(), told) is None, "there the environment's rewards decide"


async def test_it_keeps_the_rules_of_rewards_and_follows_the_return_of_what_nobody_judged() -> None:
    await check_reward(RecordedReward(), [example_trajectory(at) for at in range(3)])
    assert (await RecordedReward()(example_trajectory())).reward == 1.0
    failed = known_score(RecordedReward(), example_trajectory(3), [score("tests-1", 1.0)])
    assert failed is None, "what failed is no sample, whatever was said of it"
