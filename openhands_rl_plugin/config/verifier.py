"""``[rl.verifier]``: what a verifier is trained on, and how its predictions become probabilities."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from openhands_rl_plugin.config.fields import Settings


class VerifierSettings(Settings):
    """``[rl.verifier]``: labels, data and calibration of `openhands-rl train --verifier`."""

    label: str = Field(
        default="resolved",
        min_length=1,
        description="target: resolved (from the evidence), or a reward's name (its stored scores)",
    )
    label_at: float = Field(default=1.0, description="for a reward: a score of at least this is a success")
    max_length: int = Field(
        default=10_240,
        ge=1,
        description="tokens of an episode and the question about it; longer episodes are cut in the middle",
    )
    negatives: float = Field(default=1.0, ge=0, description="failures per success in training; 0: all")
    held_out: float = Field(
        default=0.2, gt=0, lt=1, description="fraction of the tasks for evaluation, never trained on"
    )
    calibration: Literal["none", "temperature", "platt"] = Field(
        default="none",
        description="how predictions are made probabilities, on the held-out tasks: temperature or Platt scaling",
    )
