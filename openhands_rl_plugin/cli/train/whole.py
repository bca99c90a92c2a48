"""``openhands-rl train --method full``: all weights of a model, and a model directory of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.config.rl import TrainingSettings

if TYPE_CHECKING:
    from openhands_rl_plugin.training.data.dataset import TrainingDataset
    from openhands_rl_plugin.training.trainer.full_trainer import TrainedModel
    from openhands_rl_plugin.training.trainer.metrics import TrainProgress


def train_whole(
    model: Path,
    settings: TrainingSettings,
    dataset: TrainingDataset,
    progress: AbstractContextManager[Callable[[TrainProgress], None]],
    *,
    root: Path,
    name: str,
    base_model: str,
    leads: bool,
) -> TrainedModel | None:
    """Train, and write ``ROOT/NAME-model-v000001`` (or the next free number), which who leads returns.

    Raises ``RLError``.
    """
    from openhands_rl_plugin.training.trainer.full_trainer import FullTrainer

    trainer = FullTrainer(model, settings)
    with progress as advanced:
        metrics = trainer.sft(dataset.samples, advanced, run=root / f"{name}.training").as_floats()
    if not leads:
        trainer.hand_over()
        trainer.finish()
        return None
    names = (root / f"{name}-model-v{number:06d}" for number in count(1))
    target = next(path for path in names if not path.exists())
    made = trainer.save_model(target, base_model=base_model, metrics=metrics)
    trainer.finish()
    return made
