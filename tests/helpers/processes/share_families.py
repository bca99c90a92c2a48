"""Computes models of many families as one of several processes: share_families.py FOLDER OUT.

Rank 0 leaves in OUT, for each family whose model is in FOLDER, its logprobs and gradient, or why it was refused.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from families import FAMILIES
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.distributed.ranks import join_ranks
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy


def figures(model: Path, targets: tuple[str, ...], size: int = 1) -> tuple[Tensor, Tensor]:
    """Logprobs of three sequences, two of which begin alike, and the gradient of a sum of them."""
    settings = TrainingSettings(
        dtype="float32", lora_rank=2, lora_alpha=4, target_modules=targets, context_parallel_size=size
    )
    policy = TrainablePolicy(model, settings)
    numbers = random.Random(5)
    ids = [numbers.randrange(2, 128) for _ in range(300)]
    sequences = [(*ids[:60], *ids[60:100]), (*ids[:60], *ids[100:130]), tuple(ids[130:211])]
    wanted = [(s, t) for s, sequence in enumerate(sequences) for t in range(1, len(sequence), 3)]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    logprobs, _ = policy.logprobs(lay_out(sequences), wanted)
    (logprobs * torch.linspace(-1, 1, len(wanted))).sum().backward()
    parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in policy.parameters.values()]
    gradient = torch.cat([part.flatten() for part in parts])
    if size > 1:
        dist.all_reduce(gradient)
    return logprobs.detach(), gradient


def main() -> None:
    """Join the others, then compute one family after the other."""
    torch.set_num_threads(1)
    folder, out, *_ = sys.argv[1:]
    found: dict[str, tuple[Tensor, Tensor] | str] = {}
    with join_ranks() as ranks:
        for family in FAMILIES:
            if not (Path(folder) / family.model_type).exists():
                continue
            try:
                found[family.model_type] = figures(Path(folder) / family.model_type, family.targets, size=2)
            except TrainingError as error:
                found[family.model_type] = str(error)
    if ranks.rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main()
