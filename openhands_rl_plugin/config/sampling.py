"""``[rl.sampling]``: how rollouts are sampled."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.config.fields import Settings
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import SamplingParams


class SamplingSettings(Settings):
    """``[rl.sampling]``: sampling of rollouts. All but the temperature and the seed are neutral by default.

    Reinforcement learning divides the logits by the temperature, and has no gradient for the others: answers sampled
    with a ``top_p``, ``top_k``, ``min_p`` or a penalty are imitated or preferred, not reinforced.
    """

    temperature: float = Field(
        default=1.0, ge=0, le=10, description="sampling temperature of rollouts; 0: greedy, which RL cannot train on"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling: share of probability; RL needs 1")
    top_k: int = Field(default=-1, ge=-1, description="sample among so many likeliest tokens; -1: all; RL needs -1")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="least probability of a token, as a share of the likeliest's; RL needs 0"
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, le=10, description="divides logits of tokens in prompt and answer so far; RL needs 1"
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="subtracted from logits of tokens in the answer so far; RL needs 0"
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="subtracted for each time a token is in the answer so far; RL needs 0"
    )
    seed: int = Field(default=0, ge=0, description="seed of the run; every episode derives its own from it")

    def params(self, *, max_tokens: int | None, seed: int | None) -> SamplingParams:
        """The sampling parameters of one episode."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", *NEUTRAL_PARAMETERS)}
        return SamplingParams(**own, max_tokens=max_tokens, seed=seed)
