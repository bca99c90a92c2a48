"""Training sequences of an episode, for the rows of trainers."""

from __future__ import annotations

from typing import Any

from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.core.types import PolicyRef, Sample, StopReason, StrategySpec

POLICY = PolicyRef(base_model="base", adapter="trl-policy", version=3)


def sample_of(turns: list[Any], advantage: float, leaf: int = 0) -> Sample:
    """Prompts and answers, one after another."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []
    for number, (prompt, answer) in enumerate(turns):
        spans.append((number, len(ids) + len(prompt), len(ids) + len(prompt) + len(answer)))
        ids += [*prompt, *(token for token, _ in answer)]
        mask += [*[False] * len(prompt), *[True] * len(answer)]
        logprobs += [*[0.0] * len(prompt), *(value for _, value in answer)]
    return Sample(
        trajectory_id="t",
        leaf=leaf,
        input_ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantage=advantage,
        policy=POLICY,
        spans=tuple(spans),
    )


ONE = sample_of([([1, 2], [(3, -0.5), (4, -0.25)]), ([5], [(6, -1.0)])], 0.5)


def rollout(*segments: Sample, **more: object) -> PlayedRollout:
    given = {"trajectory_id": "t", "run_id": "r", "group_id": "g", "task_id": "task", "environment": "webshop"}
    own = {"strategy": StrategySpec(name="StandardReAct"), "policy": POLICY, "stop": StopReason.TERMINATED}
    return PlayedRollout.model_validate({**given, **own, "reward": 1.0, "segments": segments, "turns": 2, **more})
