"""One finished episode as a trainer needs it: the reward, and the training sequences with ids, mask and logprobs."""

from __future__ import annotations

from typing import Literal

from openhands_rl_plugin.core.types import (
    Failure,
    Frozen,
    JsonObject,
    Message,
    PolicyRef,
    Sample,
    StopReason,
    StrategySpec,
    Usage,
)

TIMED_OUT = "rollout.timeout"
"""The boundary of the failure of an episode that was not over in time."""


class PlayedRollout(Frozen):
    """One episode. With a ``failure`` it is no sample of the policy: no reward, no segments, and never one of 0.

    ``segments``: the training sequences in order, several where a prompt did not extend the one before; all of them
    have the episode's reward, and the episode counts once in a baseline, however many there are. ``off_policy``: how
    answers were sampled, where not from the policy at a temperature (empty: they may be reinforced). ``shortened``:
    what came after a secret is left out. ``cut_short``: a limit ended it. ``resolved``: the verdict of the tests of a
    repository task, or of an environment's criterion. ``seconds`` of wall time. Without ``usage`` nothing was sampled.
    """

    schema_version: Literal[1] = 1
    trajectory_id: str
    run_id: str
    group_id: str
    task_id: str
    environment: str
    strategy: StrategySpec
    policy: PolicyRef
    reward: float | None = None
    reward_version: str = ""
    resolved: bool | None = None
    stop: StopReason
    cut_short: bool = False
    failure: Failure | None = None
    segments: tuple[Sample, ...] = ()
    off_policy: str = ""
    shortened: bool = False
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    turns: int = 0
    usage: Usage = Usage()
    seconds: float = 0.0
