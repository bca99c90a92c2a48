"""Which episodes an algorithm may train on, by their stop reason and sampling parameters.

Servers return the logprobs of the full distribution at temperature 1, and the trainer computes the same ones. Tokens
sampled at another temperature or with a ``top_p`` come from another distribution: their importance ratio is wrong,
although it is 1 in the first step, and neither clipping nor importance correction detects that.
"""

from __future__ import annotations

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import SamplingParams, StopReason, Trajectory

_INTERRUPTED = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})
_LIMIT_REACHED = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS})

_ON_TEMPERATURE = (1.0, 1.0)
"""The temperature and ``top_p`` of the distribution whose logprobs are recorded."""


def is_interrupted(trajectory: Trajectory) -> bool:
    """Whether a timeout or the end of the process ended the episode, so its reward is not a result of the policy."""
    return trajectory.stop in _INTERRUPTED


def is_overlong(trajectory: Trajectory, settings: TrainingSettings) -> bool:
    """Whether a limit cut the episode short and ``overlong`` excludes such episodes (DAPO's overlong filtering)."""
    return settings.overlong == "leave-out" and trajectory.stop in _LIMIT_REACHED


def samplings(trajectory: Trajectory) -> tuple[tuple[float, float], ...]:
    """The distinct pairs of temperature and ``top_p`` of the answers that were acted on, in order."""
    return tuple(sorted({_sampling(node.sampling) for node in trajectory.sampled()}))


def is_off_temperature(trajectory: Trajectory) -> bool:
    """Whether an answer that was acted on was sampled from another distribution than that of its logprobs."""
    return any(sampling != _ON_TEMPERATURE for sampling in samplings(trajectory))


def is_sampled_off_temperature(params: SamplingParams | None) -> bool:
    """Whether these parameters give another distribution than that of the recorded logprobs."""
    return _sampling(params) != _ON_TEMPERATURE


def _sampling(params: SamplingParams | None) -> tuple[float, float]:
    """Temperature and ``top_p``; those not sent are the server's defaults, which are 1."""
    temperature, top_p = (None, None) if params is None else (params.temperature, params.top_p)
    return 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p
