"""The algorithms by name: advantage estimator, objective and loss aggregation.

An algorithm is an estimator, an objective and weights; everything else is a named option of ``[rl.training]``. Bounds
and weights are those of the papers (see the estimators here and ``losses``) and can be overridden one by one.

An estimator takes the rewards, the group (rollouts of one task) and the number of sampled tokens of each rollout, and
returns advantages in the same order. Where published implementations disagree:

- ``whiten`` divides by the *biased* standard deviation over tokens, with a floor of 1e-8 for the variance (OpenRLHF, by
  the authors of REINFORCE++; verl divides by the unbiased one);
- GRPO's standard deviation is Bessel-corrected, and 1e-6 is added to it (verl; TRL adds 1e-4).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Adapter, Sample
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE, read_adapter_config
from openhands_rl_plugin.models.adapters.store import weights_sha256

VARIANCE_FLOOR, EPSILON = 1e-8, 1e-6
"""The values in OpenRLHF and verl: they avoid a division by zero where all advantages are equal."""


class RolloutBatch(NamedTuple):
    """The rollouts of one batch; each field has one entry per rollout. ``lengths`` are in sampled tokens."""

    rewards: Sequence[float]
    groups: Sequence[int]
    lengths: Sequence[int]


def returns(rollouts: RolloutBatch) -> list[float]:
    """The rewards themselves, without a baseline (REINFORCE, Williams 1992); no groups."""
    return [float(reward) for reward in rollouts.rewards]


def rloo(rollouts: RolloutBatch) -> list[float]:
    """RLOO, the leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740): ``(r - mean) n / (n - 1)``.

    A group of one rollout has no baseline; its advantage is 0.
    """
    return _per_group(rollouts, _leave_one_out)


def grpo(rollouts: RolloutBatch) -> list[float]:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): ``(r - mean) / (std + 1e-6)`` of the group, std with n - 1.

    A group of one rollout has no baseline; its advantage is 0 (in verl, its reward).
    """
    return _per_group(rollouts, _standardise)


def dr_grpo(rollouts: RolloutBatch) -> list[float]:
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): ``r - mean`` of the group, not divided by its deviation."""
    return _per_group(rollouts, centre)


@dataclass(frozen=True)
class Estimator:
    """An algorithm's advantages: a baseline, and whitening over all tokens of the batch if ``whitened``.

    ``grouped``: whether it compares the rollouts of a group.
    """

    baseline: Callable[[RolloutBatch], list[float]]
    grouped: bool = True
    whitened: bool = False

    def __call__(self, rollouts: RolloutBatch) -> list[float]:
        """Advantages of whole rollouts."""
        values = self.baseline(rollouts)
        return whiten(values, rollouts.lengths) if self.whitened else values


ESTIMATORS: Mapping[str, Estimator] = {
    # REINFORCE++ (Hu 2025, arXiv 2501.03262): without groups, and its variant with the group's mean as baseline.
    "reinforce++": Estimator(returns, grouped=False, whitened=True),
    "reinforce++-baseline": Estimator(dr_grpo, whitened=True),
    "rloo": Estimator(rloo),
    "grpo": Estimator(grpo),
    "dr-grpo": Estimator(dr_grpo),
}


def centre(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group minus their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def whiten(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Zero mean and unit variance over tokens, where each of the ``lengths[i]`` tokens has the value ``values[i]``.

    The normalisation of REINFORCE++ (Hu 2025, arXiv 2501.03262).
    """
    tokens = sum(lengths)
    if tokens == 0:
        return list(values)
    mean = sum(value * length for value, length in zip(values, lengths, strict=True)) / tokens
    squares = sum(length * (value - mean) ** 2 for value, length in zip(values, lengths, strict=True))
    scale = 1.0 / math.sqrt(max(squares / tokens, VARIANCE_FLOOR))
    return [(value - mean) * scale for value in values]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    return [value * n / (n - 1) for value in centre(rewards)] if n > 1 else [0.0]


def _standardise(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    if n == 1:
        return [0.0]
    centred = centre(rewards)
    deviation = math.sqrt(sum(value * value for value in centred) / (n - 1))
    return [value / (deviation + EPSILON) for value in centred]


def _per_group(rollouts: RolloutBatch, of_group: Callable[[Sequence[float]], list[float]]) -> list[float]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(rollouts.groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rollouts.rewards)
    for indices in members.values():
        for index, value in zip(indices, of_group([rollouts.rewards[i] for i in indices]), strict=True):
            advantages[index] = value
    return advantages


Kind = Literal["imitation", "preference", "reinforcement"]
Objective = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "fixed"]
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


_NOTHING = Estimator(lambda rollouts: [0.0] * len(rollouts.rewards), grouped=False)  # nothing is learnt from rewards

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


def digest_of(samples: Sequence[Sample], settings: TrainingSettings, *more: object) -> str:
    """A digest of what the result of a training depends on: sequences, settings and ``more``."""
    digest = hashlib.sha256(f"{settings.model_dump_json(exclude=WITHOUT_EFFECT)}{more}".encode())
    for sample in samples:
        digest.update(sample.model_dump_json(exclude={"logprobs", "policy", "teacher_logprobs"}).encode())
    return digest.hexdigest()


def algorithm_of(settings: TrainingSettings) -> Algorithm:
    """The algorithm that the settings name."""
    return ALGORITHMS[settings.algorithm]


def clip_bounds(settings: TrainingSettings) -> tuple[float, float]:
    """How far below and above 1 a ratio may be."""
    algorithm = algorithm_of(settings)
    return settings.clip_low or algorithm.low, settings.clip_high or algorithm.high


def aggregation_of(settings: TrainingSettings) -> Aggregation:
    """The unit with equal weight in an optimiser batch: token, sequence, or a fixed length."""
    return algorithm_of(settings).aggregation if settings.aggregation == "auto" else settings.aggregation


def old_logprobs_of(settings: TrainingSettings) -> OldLogprobs:
    """Which logprobs are the ratio's denominator; "auto" if the choice depends on their measured mismatch.

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


def check_start(adapter: Adapter | None, settings: TrainingSettings) -> None:
    """Raise an error unless ``adapter``, if there is one, is as it was made and fits ``settings``.

    Another LoRA rank, scale or other layers would change the policy before its first step, and no tensor shape would
    show it. A version that is a whole model is continued with ``method = "full"`` only, and an adapter without. Raises
    ``TrainingError``, or ``ConfigError`` for an adapter whose configuration cannot be read.
    """
    if adapter is None:
        return
    path = Path(adapter.path)
    if weights_sha256(path) != adapter.sha256:
        raise TrainingError(f"{adapter.name}: what is in {path} was changed since it was made (sha256 differs)")
    whole = not (path / CONFIG_FILE).exists() and (path / "config.json").exists()
    if whole != (settings.method == "full"):
        kind = "a whole model" if whole else "an adapter"
        raise TrainingError(
            f'{adapter.name} is {kind}, and [rl.training] method = "{settings.method}" does not continue it: set '
            "another method, start from base, or choose another name for the new one ([rl.serving] adapter)"
        )
    if whole:
        return
    made = read_adapter_config(path)
    found: dict[str, object] = {"lora_rank": made.r, "lora_alpha": made.lora_alpha, "lora_variant": made.variant}
    if made.layers is not None:
        found["target_modules"] = sorted(made.layers)
    for name, value in found.items():
        wanted: object = getattr(settings, name)
        wanted = sorted(settings.target_modules) if name == "target_modules" else wanted
        if value != wanted:
            value, wanted = (repr(each).replace("'", '"') for each in (value, wanted))
            raise TrainingError(
                f"{adapter.name} was made with {name} = {value}, and [rl.training] has {wanted}: set {name} = {value} "
                "to continue from it, or start from base"
            )
