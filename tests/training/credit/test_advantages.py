"""Who is compared with whom, and who leaves the baseline."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason, Trajectory
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.training.credit.advantages import group_advantages


def episode(number: int, group: str, **changes: object) -> Trajectory:
    return example_trajectory(number).model_copy(
        update={"id": str(number), "group_id": group, "failure": None, **changes}
    )


def test_a_group_without_signal_gets_no_advantage() -> None:
    played = [episode(0, "a"), episode(1, "a"), episode(2, "b"), episode(3, "b")]
    baseline = group_advantages(played, [1.0, 0.0, 0.5, 0.5])
    assert baseline.advantages[2:] == (None, None)
    assert baseline.advantages[0] > 0 > baseline.advantages[1]
    assert (baseline.used, baseline.flat) == (2, 2)


def test_failed_timed_out_unfinished_and_unscored_episodes_leave_the_baseline() -> None:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    played = [
        episode(0, "a"),
        episode(1, "a"),
        episode(2, "a", failure=failure),
        episode(3, "a", stop=StopReason.TIMEOUT),
        episode(4, "a"),
        episode(5, "b"),
        episode(6, "a", stop=StopReason.UNFINISHED),
    ]
    baseline = group_advantages(played, [1.0, 0.0, 0.0, 0.0, None, 1.0, 1.0])
    assert baseline.advantages[2:] == (None,) * 5
    assert (baseline.used, baseline.failed, baseline.unscored, baseline.alone) == (2, 3, 1, 1)
    assert baseline.advantages[0] == pytest.approx(-baseline.advantages[1])
