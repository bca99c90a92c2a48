"""The algorithms by name: advantage estimator, objective and loss aggregation.

An algorithm is an estimator, an objective and weights; everything else is a named option of ``[rl.training]``. Bounds
and weights are those of the papers (see ``estimators`` and ``objectives``) and can be overridden one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.training.credit.estimators import ESTIMATORS, Estimator, nothing

Kind = Literal["imitation", "preference", "reinforcement"]
Objective = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "fixed", "rollout"]
OldLogprobs = Literal["auto", "recorded", "recomputed"]


@dataclass(frozen=True)
class Algorithm:
    """A setting of the trainer's loss: cross-entropy, a policy gradient, or preferences.

    ``low`` and ``high`` are the clip's bounds around a ratio of 1; they, ``objective`` and ``estimator`` are for
    reinforcement only. ``rewarded``: whether rewards are looked at; else a teacher's logprobs alone are.
    """

    kind: Kind
    objective: Objective = "ppo"
    aggregation: Aggregation = "token"
    estimator: Estimator = ESTIMATORS["reinforce++-baseline"]
    rewarded: bool = True
    low: float = 0.2
    high: float = 0.2


_NOTHING = Estimator(nothing, grouped=False)

ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "sft": Algorithm("imitation"),
    # RAFT, arXiv 2304.06767
    "rejection-sampling": Algorithm("imitation"),
    # arXiv 2501.03262
    "reinforce++": Algorithm("reinforcement", estimator=ESTIMATORS["reinforce++"]),
    # The same, with DAPO's clip-higher: it keeps the entropy up at no cost.
    "reinforce++-baseline": Algorithm("reinforcement", high=0.28),
    # arXiv 2402.14740
    "rloo": Algorithm("reinforcement", estimator=ESTIMATORS["rloo"]),
    # arXiv 2402.03300
    "grpo": Algorithm("reinforcement", aggregation="sequence", estimator=ESTIMATORS["grpo"]),
    # arXiv 2503.20783
    "dr-grpo": Algorithm("reinforcement", aggregation="fixed", estimator=ESTIMATORS["dr-grpo"]),
    # arXiv 2503.14476. Its dynamic filtering (groups without a signal are left out) is done for all algorithms that
    # compare in groups.
    "dapo": Algorithm("reinforcement", estimator=ESTIMATORS["grpo"], high=0.28),
    # arXiv 2507.18071
    "gspo": Algorithm("reinforcement", "gspo", "sequence", ESTIMATORS["grpo"], low=3e-4, high=4e-4),
    # arXiv 2506.13585
    "cispo": Algorithm("reinforcement", "cispo", estimator=ESTIMATORS["grpo"], high=0.28),
    # arXiv 2306.13649
    "opd": Algorithm("reinforcement", estimator=_NOTHING, rewarded=False),
    # arXiv 2602.04942
    "opsd": Algorithm("reinforcement", estimator=_NOTHING, rewarded=False),
    # arXiv 2305.18290
    "dpo": Algorithm("preference"),
}


WITHOUT_EFFECT = {"checkpoint_steps", "tracker", "sharding"}
"""Settings that the result of a training does not depend on."""


def algorithm_of(settings: TrainingSettings) -> Algorithm:
    """The algorithm that the settings name."""
    return ALGORITHMS[settings.algorithm]


def clip_bounds(settings: TrainingSettings) -> tuple[float, float]:
    """How far below and above 1 a ratio may be."""
    algorithm = algorithm_of(settings)
    return settings.clip_low or algorithm.low, settings.clip_high or algorithm.high


def aggregation_of(settings: TrainingSettings) -> Aggregation:
    """What counts the same in an optimiser batch."""
    return algorithm_of(settings).aggregation if settings.aggregation == "auto" else settings.aggregation


def old_logprobs_of(settings: TrainingSettings) -> OldLogprobs:
    """Whose logprobs are the denominator of the ratio; "auto" only where that depends on their measured mismatch.

    An importance correction weighs the recomputed ones against the recorded ones. GSPO's bounds are far below the
    difference of two engines, so that its first on-policy step would be clipped.
    """
    if settings.old_logprobs != "auto":
        return settings.old_logprobs
    chosen = settings.correction != "none" or algorithm_of(settings).objective == "gspo"
    return "recomputed" if chosen else "auto"


def needs_logprobs(settings: TrainingSettings) -> bool:
    """Whether the logprobs of the policy that sampled must have been recorded."""
    return algorithm_of(settings).kind == "reinforcement"
