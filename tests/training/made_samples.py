"""Samples and small helpers that the trainer's tests share."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from openhands_rl_plugin.settings import TrainingSettings
from openhands_rl_plugin.training.trainer import LoraTrainer
from openhands_rl_plugin.types import Sample

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


def adapter_of(trainer: LoraTrainer, path: Path) -> dict[str, torch.Tensor]:
    trainer.save_adapter(path)
    return load_file(path / "adapter_model.safetensors")


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=tolerance, atol=tolerance, msg=name)
