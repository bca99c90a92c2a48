"""Samples and small helpers that the trainer's tests share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.algorithms import ALGORITHMS
from openhands_rl_plugin.training.data.dataset import PreferencePair
from openhands_rl_plugin.training.trainer.trainer import Trainer

EXACT = TrainingSettings(dtype="float32", learning_rate=1e-2, num_epochs=2, batch_size=2)


def make_samples(count: int = 6, *, length: int = 40, seed: int = 0) -> list[Sample]:
    """Pairs of samples begin alike; every third token from 20 on was sampled."""
    numbers = random.Random(seed)
    prompts = [tuple(numbers.randrange(400) for _ in range(length // 2)) for _ in range((count + 1) // 2)]
    made = []
    for at in range(count):
        ids = (*prompts[at // 2], *(numbers.randrange(400) for _ in range(length - length // 2 + at)))
        mask = tuple(t >= 20 and t % 3 == 0 for t in range(len(ids)))
        logprobs = tuple(-6.0 + numbers.random() if sampled else 0.0 for sampled in mask)
        made.append(
            Sample(
                trajectory_id=str(at),
                leaf=0,
                input_ids=ids,
                mask=mask,
                logprobs=logprobs,
                advantage=(1.0, -0.7, 0.4, -1.3)[at % 4],
            )
        )
    return made


def segmented(samples: list[Sample]) -> list[Sample]:
    """The first two are segments of one rollout."""
    same = {"trajectory_id": samples[0].trajectory_id, "advantage": samples[0].advantage}
    return [samples[0], samples[1].model_copy(update=same), *samples[2:]]


def learn(trainer: Trainer, samples: Sequence[Sample], algorithm: str) -> dict[str, float]:
    """Train by the algorithm; for DPO, of two samples in a row the first is the chosen one."""
    kind = ALGORITHMS[algorithm].kind
    if kind == "imitation":
        return trainer.sft(samples)
    if kind == "preference":
        halves = zip(samples[::2], samples[1::2], strict=False)
        return trainer.prefer([PreferencePair(chosen=(good,), rejected=(bad,)) for good, bad in halves])
    return trainer.reinforce(samples)


def adapter_of(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
    trainer.save_adapter(path)
    return load_file(path / "adapter_model.safetensors")


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=tolerance, atol=tolerance, msg=name)
