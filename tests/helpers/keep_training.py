"""Trains, and prints a line after every step: python keep_training.py MODEL RUN."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from made_samples import EXACT, make_samples

from openhands_rl_plugin.training.trainer.trainer import LocalTrainer


def train(model: Path, run: Path) -> tuple[LocalTrainer, dict[str, float]]:
    """Nine steps in three epochs, with a checkpoint after every second one."""
    torch.set_num_threads(1)
    changes = {"algorithm": "grpo", "correction": "truncate", "checkpoint_steps": 2, "num_epochs": 3}
    trainer = LocalTrainer(model, EXACT.model_copy(update=changes))
    return trainer, trainer.reinforce(make_samples(), lambda at: print(at["done"], flush=True), run=run)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
