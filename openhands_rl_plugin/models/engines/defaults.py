"""What an engine does with the parameters that a call leaves open."""

from __future__ import annotations

from openhands_rl_plugin.core.types import SamplingParams


def merge_sampling(given: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    """``given``, with what it leaves open taken from ``default``."""
    if given is None:
        return default
    left_open = [name for name in SamplingParams.model_fields if getattr(given, name) in (None, ())]
    return given.model_copy(update={name: getattr(default, name) for name in left_open})
