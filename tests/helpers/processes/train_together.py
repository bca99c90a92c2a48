"""Trains as one of several processes: train_together.py MODEL OUT CHANGES STEPS KIND...

A KIND names what is trained, CHANGES (JSON) other settings; rank 0 leaves the metrics, the adapter and the optimiser's
state of each in OUT/KIND.
After STEPS steps (0: never) a process ends as if it was killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from made_samples import EXACT, make_samples
from torch.distributed.tensor import DTensor

from openhands_rl_plugin.training.data.dataset import PreferencePair
from openhands_rl_plugin.training.distributed.ranks import join_ranks, local_shard, shard_layers
from openhands_rl_plugin.training.policies.packed_model import load_model
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

KINDS: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "grpo": {"algorithm": "grpo", "correction": "truncate", "kl": "k3", "batch_size": 3},
    "passes": {"algorithm": "dapo", "batch_size": 5, "max_tokens_per_micro_batch": 64},
    "dpo": {"algorithm": "dpo"},
    "full": {
        "method": "full",
        "algorithm": "sft",
        "learning_rate": 1e-3,
        "batch_size": 3,
        "max_tokens_per_micro_batch": 100,
    },
    "full-low": {"method": "full", "algorithm": "sft", "learning_rate": 1e-3, "batch_size": 3, "dtype": "bfloat16"},
    "full-killed": {
        **{"method": "full", "algorithm": "sft", "learning_rate": 1e-3, "gradient_checkpointing": True},
        **{"num_epochs": 3, "checkpoint_steps": 2},
    },
    "entropy": {**{"algorithm": "grpo", "entropy_coefficient": 0.01, "batch_size": 3}, "gradient_checkpointing": True},
    "heated": {"algorithm": "grpo", "old_logprobs": "recomputed", "kl": "k3", "batch_size": 3},
    "gspo": {"algorithm": "gspo", "num_epochs": 3, "checkpoint_steps": 2},
}


def train(
    model: Path, out: Path, kind: str, changes: Mapping[str, Any] | None = None, steps: int = 0
) -> dict[str, float]:
    """Train, and write what came of it; the figures of rank 0."""
    settings = EXACT.model_copy(update={**KINDS[kind], **(changes or {})})
    samples = make_samples(7)
    if kind == "heated":
        samples = [sample.model_copy(update={"temperature": 0.7}) for sample in samples]
    run = out / kind / "run"

    def stop(at: Any) -> None:
        if at["done"] == steps:
            print("killed", file=sys.stderr, flush=True)
            os._exit(1)

    if settings.method == "full":
        return train_whole(LocalTrainer(model, settings), out / kind, stop)
    trainer = LocalTrainer(model, settings)
    if kind == "dpo":
        pairs = [PreferencePair((samples[at],), (samples[at + 1],)) for at in (0, 2, 4)]
        metrics = trainer.prefer(pairs, stop, run=run)
    elif kind == "sft":
        metrics = trainer.sft(samples, stop, run=run)
    else:
        metrics = trainer.reinforce(samples, stop, run=run)
    probe = trainer.probe(samples[0].input_ids)
    figures = {name: value for name, value in metrics.items() if "second" not in name}
    figures["probe"] = sum(probe.logprobs)
    if int(os.environ.get("RANK", "0")) == 0:
        trainer.save_adapter(out / kind / "adapter")
        trainer.save_state(out / kind)
        (out / kind / "metrics.json").write_text(json.dumps(figures))
    return figures


def train_whole(trainer: LocalTrainer, out: Path, stop: Callable[[Any], None]) -> dict[str, float]:
    """The same for all weights; a model directory comes out."""
    metrics = trainer.sft(make_samples(7), stop, run=out / "run")
    figures = {name: value for name, value in metrics.items() if "second" not in name}
    figures["probe"] = sum(trainer.probe(make_samples(1)[0].input_ids).logprobs)
    figures["parts"] = sum(local_shard(parameter).numel() for parameter in trainer.parameters.values())
    if int(os.environ.get("RANK", "0")):
        trainer.hand_over()
        trainer.finish()
        return figures
    trainer.save_adapter(out / "model")
    trainer.finish()
    (out / "metrics.json").write_text(json.dumps(figures))
    return figures


def note_held(model: Path, out: Path) -> None:
    """How many numbers of the base model a rank keeps in its layers, of how many, and outside of them."""
    base = load_model(str(model), torch.float32, torch.device("cpu"))
    layers = [parameter for name, parameter in base.named_parameters() if ".layers." in name]
    held = {"all_layers": sum(each.numel() for each in layers)}
    shard_layers(base, (), torch.device("cpu"))
    parameters = dict(base.named_parameters())
    held["layers"] = sum(each.to_local().numel() for each in parameters.values() if isinstance(each, DTensor))
    held["rest"] = sum(each.numel() for each in parameters.values() if not isinstance(each, DTensor))
    if int(os.environ["RANK"]) == 0:
        (out / "held.json").write_text(json.dumps(held))


def main() -> None:
    """Join the others, then train one kind after the other."""
    torch.set_num_threads(1)
    model, out, text, steps, *kinds = sys.argv[1:]
    changes = json.loads(text)
    with join_ranks():
        for kind in kinds:
            train(Path(model), Path(out), kind, changes, int(steps))
        if changes.get("sharding") == "layers":
            note_held(Path(model), Path(out))


if __name__ == "__main__":
    main()
