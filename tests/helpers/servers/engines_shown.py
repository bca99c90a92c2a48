"""What the tests of an engine other than ours take: its algorithms, bounds and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from openhands_rl_plugin.config.rl import AlgorithmName

ALGORITHMS: tuple[str, ...] = get_args(AlgorithmName)


@dataclass(frozen=True)
class Shown:
    """What the tests of an engine show, beside the local trainer.

    ``packages``: the releases that are tested. ``gradients``: algorithms with the settings that the gradient of a batch
    is compared with, whose cosine is above ``cosine``.
    """

    packages: Mapping[str, str]
    gradients: Mapping[str, Mapping[str, object]]
    cosine: float


SHOWN: Mapping[str, Shown] = {
    "tinker": Shown(
        packages={"tinker": "0.25.0", "skyrl": "0.4.0"},
        gradients={
            **{name: {"old_logprobs": "recorded"} for name in ("reinforce++-baseline", "grpo", "cispo")},
            **{name: {"old_logprobs": "recorded"} for name in ("rloo", "dr-grpo", "dapo")},
            **{name: {} for name in ("gspo", "sft", "rejection-sampling", "dpo")},
            "reinforce++": {"correction": "truncate"},
        },
        cosine=0.999,
    )
}
