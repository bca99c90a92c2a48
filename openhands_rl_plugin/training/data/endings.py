"""What the end of an episode says about the policy: which episodes can be compared, and which a limit cut short."""

from __future__ import annotations

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import StopReason, Trajectory

# Ends that say nothing about the policy: the episode would have gone on.
_NO_SAMPLE = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})
_CUT_SHORT = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS})


def is_no_sample(trajectory: Trajectory) -> bool:
    """Whether the clock or the process ended it, so that its reward is no reward of what the policy does."""
    return trajectory.stop in _NO_SAMPLE


def is_overlong(trajectory: Trajectory, settings: TrainingSettings) -> bool:
    """Whether a limit cut it short, and ``overlong`` says that such episodes are not trained on."""
    return settings.overlong == "leave-out" and trajectory.stop in _CUT_SHORT
