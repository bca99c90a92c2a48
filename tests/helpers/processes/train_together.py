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

from openhands_rl_plugin.training.data.dataset import PreferencePair
from openhands_rl_plugin.training.distributed.ranks import join_ranks, local_shard
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
    "full-killed": {
        **{"method": "full", "algorithm": "sft", "learning_rate": 1e-3, "gradient_checkpointing": True},
        **{"num_epochs": 3, "checkpoint_steps": 2},
    },
    "gspo": {"algorithm": "gspo", "num_epochs": 3, "checkpoint_steps": 2},
}


def train(
    model: Path, out: Path, kind: str, changes: Mapping[str, Any] | None = None, steps: int = 0
) -> dict[str, float]:
    """Train, and write what came of it; the figures of rank 0."""
    settings = EXACT.model_copy(update={**KINDS[kind], **(changes or {})})
    samples = make_samples(7)
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


def main() -> None:
    """Join the others, then train one kind after the other."""
    torch.set_num_threads(1)
    model, out, text, steps, *kinds = sys.argv[1:]
    changes = json.loads(text)
    with join_ranks():
        for kind in kinds:
            train(Path(model), Path(out), kind, changes, int(steps))


if __name__ == "__main__":
    main()
