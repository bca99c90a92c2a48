"""Advantages against the golden values of verl, TRL and OpenRLHF, and to 1e-9 against the formulas behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.training.algorithms import ESTIMATORS, RolloutBatch, dr_grpo, grpo, rloo

pytestmark = pytest.mark.contract

BATCH = RolloutBatch(
    rewards=[1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    groups=[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
    lengths=[3, 3, 2, 1, 3, 1, 2, 3, 3, 3, 1, 2],
)


def close(*values: float) -> object:
    """The published values have four digits."""
    return pytest.approx(list(values), abs=5.1e-5)


def test_grpo_is_verls():
    mixed = [0.8660, -0.8660, -0.8660, 0.8660, 0.5, 0.5, 0.5, -1.5, 0, 0, 0, 0]
    assert grpo(BATCH) == close(*mixed)


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
