"""What packing would do to the families of models that are not packed.

Tiny random models of the tests' table. For each that is trained one sequence a micro-batch: the largest difference of a
logprob, and the cosine of the gradient, if its sequences were packed all the same.

    PYTHONPATH=tests/helpers .venv/bin/python -m evaluation.performance.training.families
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.training.data.packing import lay_out
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.policies.packed_model import ATTENTION_NAME, PACKED


def measure(model: Path, targets: tuple[str, ...]) -> tuple[float, float]:
    """(largest difference in nats, cosine of the gradients) of packed sequences against one at a time."""
    policy = TrainablePolicy(model, TrainingSettings(dtype="float32", lora_rank=2, target_modules=targets))
    torch.manual_seed(1)
    for parameter in policy.parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    numbers = random.Random(5)
    ids = [numbers.randrange(2, 128) for _ in range(300)]
    every = [(*ids[:60], *ids[60:100]), (*ids[:60], *ids[100:130]), tuple(ids[130:210])]
    alone = computed(policy, every)
    policy._base.set_attn_implementation(ATTENTION_NAME)
    policy.packing = PACKED
    packed = computed(policy, every)
    cosine = torch.cosine_similarity(alone[1], packed[1], dim=0).item()
    return (alone[0] - packed[0]).abs().max().item(), cosine


def computed(policy: TrainablePolicy, every: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Logprobs of all tokens, and the gradient of a policy gradient's loss with advantages that differ by sequence."""
    for parameter in policy.parameters.values():
        parameter.grad = None
    wanted = [(s, t) for s, ids in enumerate(every) for t in range(1, len(ids))]
    logprobs, _ = policy.logprobs(lay_out(every), wanted)
    advantages = torch.tensor([(1.0, -0.7, 0.4)[s] for s, _ in wanted])
    (-(advantages * logprobs).mean()).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters.values()]
    return logprobs.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def main() -> int:
    """Print a line a family."""
    from families import FAMILIES, write_family  # of the tests

    torch.set_num_threads(1)
    for family in FAMILIES:
        if family.how != "one sequence":
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = write_family(Path(folder) / "model", family)
            try:
                difference, cosine = measure(model, family.targets)
            except (ValueError, TypeError, RuntimeError) as error:
                print(f"{family.title:24} cannot be packed: {str(error).splitlines()[0][:60]}")
                continue
        print(f"{family.title:24} packed: {difference:.2f} nats, cosine {cosine:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
