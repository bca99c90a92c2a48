"""What counts as a success: an option, a reward's threshold, or the environment's own criterion."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.config.build import success_rule
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.types import StopReason

ENDED, CUT = StopReason.TERMINATED, StopReason.MAX_TURNS


@pytest.mark.parametrize(
    ("environment", "total", "stop", "success"),
    [
        ("webshop", 1.0, ENDED, True),
        ("webshop", 0.99, ENDED, False),
        ("agentgym/babyai", 0.72, ENDED, True),
        ("agentgym/babyai", 0.0, CUT, False),
        ("openenv/grid_world", -0.4, ENDED, True),
        ("openenv/grid_world", -0.4, CUT, False),
        ("gymnasium/minigrid:MiniGrid-Empty-5x5-v0", 0.1, ENDED, True),
        ("gymnasium/MiniGrid-LavaGapS5-v0", 0.0, ENDED, False),
        ("gymnasium/CliffWalking-v1", -13.0, ENDED, True),
        ("gymnasium/CliffWalking-v1", -13.0, CUT, False),
        ("gymnasium/Taxi-v3", 8.0, ENDED, True),
        ("gymnasium/FrozenLake-v1", 0.0, ENDED, False),
        ("os:system/FrozenLake-v1", 0.99, ENDED, False),
        ("web/own", sum([0.1] * 10), ENDED, True),
    ],
)
def test_each_environment_has_its_criterion(environment: str, total: float, stop: StopReason, success: bool):
    assert success_rule(environment).holds(total, stop) is success


def test_an_option_comes_before_a_threshold_and_a_threshold_before_the_environment():
    reward = RewardSettings(name="success-bonus", options={"threshold": 0.25})
    assert str(success_rule("agentgym/babyai", reward, 0.6)) == "a return of at least 0.6"
    assert str(success_rule("agentgym/babyai", reward)) == "a return of at least 0.25"
    assert str(success_rule("agentgym/babyai", RewardSettings())) == "a return of at least 0.5"
    assert str(success_rule("openenv/grid_world")) == "an end that the environment made"
