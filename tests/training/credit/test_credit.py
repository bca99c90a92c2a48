"""Advantages by published values and formulas; whose tokens get which: whole episodes, turns; who is left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from credited_episodes import episode, settings
from hypothesis import given
from hypothesis import strategies as st
from searched_episode import searched

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.training.algorithms import (
    ESTIMATORS,
    RolloutBatch,
    credited_samples,
    dr_grpo,
    group_advantages,
    grpo,
    rloo,
    search_rewards,
)

pytestmark = pytest.mark.contract

EPISODES = [episode(0, 0.0, 1.0), episode(1, 0.5, 0.0), episode(2, 0.0), episode(3, 1.0, group="alone")]
REWARDS = [1.0, 0.5, 0.0, 1.0]


def advantages_of_turns(trajectory: Trajectory, chosen: TrainingSettings) -> list[float]:
    """One number a sampled token of one episode among the recorded ones."""
    samples = [each for each in credited_samples(EPISODES, REWARDS, chosen) if each.trajectory_id == trajectory.id]
    return [each.advantage_at(at) for each in samples for at, sampled in enumerate(each.mask) if sampled]


def test_by_default_every_token_gets_the_episodes_advantage() -> None:
    for algorithm in ("reinforce++-baseline", "grpo", "rloo", "dr-grpo", "dapo", "gspo", "cispo"):
        chosen = settings(algorithm=algorithm)
        whole = group_advantages(EPISODES, REWARDS, chosen)
        assert whole[3] is None, "it is alone"
        for trajectory, advantage in zip(EPISODES[:3], whole, strict=False):
            assert set(advantages_of_turns(trajectory, chosen)) == {advantage}
    assert group_advantages(EPISODES, REWARDS, settings(algorithm="dr-grpo"))[:3] == [0.5, 0.0, -0.5]


def test_without_groups_nobody_is_alone() -> None:
    whole = group_advantages(EPISODES, REWARDS, settings(algorithm="reinforce++"))
    assert whole[0] == whole[3] and None not in whole
    equal = group_advantages(EPISODES, [0.5] * 4, settings(algorithm="reinforce++"))
    assert equal == [None] * 4, "all are compared with each other, and none is better"


def test_a_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    chosen = settings(algorithm="dr-grpo", step_rewards="environment", discount=0.5)
    # Returns to go: 0.5 and 1 of the first episode, 0.5 and 0 of the second, 0 of the third, which ends there.
    assert advantages_of_turns(EPISODES[0], chosen) == pytest.approx([0.5 - 1 / 3, 2 / 3, 2 / 3])
    assert advantages_of_turns(EPISODES[1], chosen) == pytest.approx([0.5 - 1 / 3] * 2 + [-1 / 3] * 3)
    assert advantages_of_turns(EPISODES[2], chosen) == pytest.approx([-1 / 3] * 3)


def test_turn_advantages_give_the_exact_gradient_in_expectation() -> None:
    """Each turn goes on or stops; stopping at turn t has the reward ``ends[t]``. All pairs of episodes are listed."""
    ends, on = (0.3, 0.9, 0.1), (0.6, 0.7)
    lengths = {1: 1 - on[0], 2: on[0] * (1 - on[1]), 3: on[0] * on[1]}

    def score(turn: int, length: int) -> float:
        """The derivative of the log-probability of going on or stopping at a turn, by its logit."""
        return (1 - on[turn]) if length > turn + 1 else -on[turn]

    def of(length: int, number: int) -> Trajectory:
        return episode(number, *[0.0] * (length - 1), ends[length - 1])

    true = [sum(p * ends[n - 1] * score(turn, n) for n, p in lengths.items() if n > turn) for turn in range(2)]
    found = [0.0, 0.0]
    for (n, p), (m, q) in itertools.product(lengths.items(), repeat=2):
        chosen = settings(algorithm="rloo", step_rewards="environment")
        credit = (
            turns_of([of(n, 0), of(m, 1)], [ends[n - 1], ends[m - 1]], chosen) if n != m else [[0.0] * n, [0.0] * m]
        )
        for length, advantages in zip((n, m), credit, strict=True):
            for turn in range(min(length, 2)):
                found[turn] += p * q * advantages[turn] * score(turn, length) / 2
    assert found == pytest.approx(true)


def turns_of(trajectories: list[Trajectory], rewards: list[float], chosen: TrainingSettings) -> list[list[float]]:
    """The advantage of each turn of each episode."""
    samples = credited_samples(trajectories, rewards, chosen)
    found: list[list[float]] = []
    for number, trajectory in enumerate(trajectories):
        mine = [s for s in samples if s.trajectory_id == trajectory.id]
        values = [s.advantage_at(at) for s in mine for at, sampled in enumerate(s.mask) if sampled]
        turns = len(list(trajectory.sampled()))
        starts = [sum(number + earlier + 1 for earlier in range(turn)) for turn in range(turns)]
        found.append([values[start] for start in starts])
    return found


async def test_search_values_can_be_the_rewards_of_steps() -> None:
    one, other = await searched(0), (await searched(1)).model_copy(update={"id": "other"})
    chosen = settings(algorithm="dr-grpo", step_rewards="search")
    credit = credited_samples([one, other], [one.episode_return, other.episode_return], chosen)
    assert sum(search_rewards(one)) == pytest.approx(one.episode_return)
    (first, *_) = [s for s in credit if s.trajectory_id == "searched"]
    half = (one.episode_return - other.episode_return) / 2
    assert first.advantage_at(_positions(first.mask)[0]) == pytest.approx(half), "the first turn's return is the whole"
    assert len({round(first.advantage_at(at), 6) for at in _positions(first.mask)}) > 1


def _positions(mask: tuple[bool, ...]) -> list[int]:
    return [at for at, sampled in enumerate(mask) if sampled]


BATCH = RolloutBatch(
    rewards=[1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    groups=[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
    lengths=[3, 3, 2, 1, 3, 1, 2, 3, 3, 3, 1, 2],
)


def close(*values: float) -> object:
    """The published values have four digits."""
    return pytest.approx(list(values), abs=5.1e-5)


def test_grpo_is_verls():
    assert grpo(BATCH) == close(0.8660, -0.8660, -0.8660, 0.8660, 0.5, 0.5, 0.5, -1.5, 0, 0, 0, 0)


def test_dr_grpo_and_rloo():
    assert dr_grpo(BATCH) == close(0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75, 0, 0, 0, 0)
    third = 1 / 3
    assert rloo(BATCH) == close(2 * third, -2 * third, -2 * third, 2 * third, third, third, third, -1, 0, 0, 0, 0)


def test_reinforce_pp_is_openrlhfs():
    assert ESTIMATORS["reinforce++"](BATCH) == close(*(1.3038 if reward else -0.7670 for reward in BATCH.rewards))
    values = [1.3762, -1.1429, -1.1429, 1.3762, 0.7464, 0.7464, 0.7464, -1.7727, *[0.1166] * 4]
    assert ESTIMATORS["reinforce++-baseline"](BATCH) == close(*values)


def by_formula(name: str, rollouts: RolloutBatch) -> list[float]:
    """The published formulas, group by group and token by token, in float64."""
    rewards, groups = np.array(rollouts.rewards, float), np.array(rollouts.groups)
    values = rewards.copy()
    for at, group in enumerate(groups):
        mine = rewards[groups == group]
        others = np.delete(rewards, at)[np.delete(groups, at) == group]
        if name in ("rloo", "grpo") and not len(others):
            values[at] = 0.0
            continue
        match name:
            case "rloo":
                values[at] = rewards[at] - others.mean()
            case "grpo":
                values[at] = (rewards[at] - mine.mean()) / (mine.std(ddof=1) + 1e-6)
            case "dr-grpo" | "reinforce++-baseline":
                values[at] = rewards[at] - mine.mean()
    if name.startswith("reinforce++"):
        tokens = np.repeat(values, rollouts.lengths)
        values = (values - tokens.mean()) / np.sqrt(max(tokens.var(), 1e-8))
    return values.tolist()


ROLLOUTS = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=20).map(
    lambda rows: RolloutBatch(*zip(*rows, strict=True))
)


@given(ROLLOUTS.filter(lambda rollouts: len(rollouts.rewards) > 1))
def test_every_estimator_is_its_formula(rollouts: RolloutBatch):
    # Nearly equal rewards are divided by next to nothing.
    rounded = rollouts._replace(rewards=[round(reward, 2) for reward in rollouts.rewards])
    for name, estimate in ESTIMATORS.items():
        expected = by_formula(name, rounded)
        assert estimate(rounded) == pytest.approx(expected, rel=1e-6, abs=1e-6), name
