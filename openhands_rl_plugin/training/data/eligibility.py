"""Which episodes an algorithm may train on, by how they ended and how they were sampled.

Servers report the logprobs of the full distribution at temperature 1, and the trainer computes the same ones. Tokens
that were sampled at another temperature or with a ``top_p`` come from another distribution: their importance ratio is
wrong from the first step on, although it reads 1, and no clip or importance correction can see that.
"""

from __future__ import annotations

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import SamplingParams, StopReason, Trajectory

_INTERRUPTED = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})
_LIMIT_REACHED = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS})

_ON_TEMPERATURE = (1.0, 1.0)
"""The temperature and ``top_p`` of the distribution whose logprobs are recorded."""


def is_interrupted(trajectory: Trajectory) -> bool:
    """Whether the clock or the process ended the episode, so that its reward says nothing about the policy."""
    return trajectory.stop in _INTERRUPTED


def is_overlong(trajectory: Trajectory, settings: TrainingSettings) -> bool:
    """Whether a limit cut the episode short and ``overlong`` excludes such episodes (DAPO's overlong filtering)."""
    return settings.overlong == "leave-out" and trajectory.stop in _LIMIT_REACHED


def samplings(trajectory: Trajectory) -> tuple[tuple[float, float], ...]:
    """The distinct pairs of temperature and ``top_p`` on the acted path, in order."""
    path = (trajectory.nodes[at] for at in trajectory.path())
    return tuple(sorted({_sampling(node.sampling) for node in path if node.sampled}))


def is_off_temperature(trajectory: Trajectory) -> bool:
    """Whether a message on the acted path was sampled from another distribution than its logprobs are of."""
    return any(sampling != _ON_TEMPERATURE for sampling in samplings(trajectory))


def _sampling(params: SamplingParams | None) -> tuple[float, float]:
    """Parameters that were not sent are the server's defaults, which are 1."""
    temperature, top_p = (None, None) if params is None else (params.temperature, params.top_p)
    return 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p
