"""Training of a candidate: once a round, whatever kills the process meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.watch.state import Round
from openhands_rl_plugin.core.errors import MissingExtraError, TrainingError, boundary
from openhands_rl_plugin.core.memory import forget_unused
from openhands_rl_plugin.core.types import Adapter, FailureKind
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.data.dataset import TrainingDataset
from openhands_rl_plugin.training.learn import PROBE_TOKENS, create_version, fit

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.metrics import TrainProgress

ROUND = "watch_round"
"""The metric of a version that says which round made it."""


def made_before(adapters: AdapterStore, name: str, current: Round) -> Adapter | None:
    """The version that a killed process wrote in this round, before it could note that."""
    found = adapters.versions(name)
    ours = [each for each in found if each.version > current.latest and each.metrics.get(ROUND) == current.number]
    return ours[0] if ours else None


def train_candidate(
    model: Path,
    settings: TrainingSettings,
    dataset: TrainingDataset,
    adapters: AdapterStore,
    name: str,
    current: Round,
    *,
    base_model: str,
    run: Path,
    on_progress: Callable[[TrainProgress], None] | None = None,
) -> Adapter:
    """Train a version of ``name`` in this thread, and keep its probe; a killed call resumes in ``run``.

    Raises ``TrainingError``, ``StorageError`` and ``CaughtFailure`` for what a library raises, such as too little
    memory.
    """
    try:
        from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    if not dataset.samples:
        raise TrainingError(f"nothing to train on; left out: {dataset.excluded.in_words()}")
    parent = adapters.get(current.parent) if current.parent is not None else None
    made = made_before(adapters, name, current)
    if made is not None and adapters.probe(made) is not None:
        return made
    probe_ids = dataset.samples[0].input_ids
    with boundary(FailureKind.MODEL, "training"):
        trainer = LoraTrainer(model, settings, adapter=made or parent)
        if made is not None:
            adapters.keep_probe(made, trainer.probe(probe_ids[-PROBE_TOKENS:], shares=True))
            return made
        metrics = fit(trainer, dataset, on_progress, run=run)
        adapter, _ = create_version(
            trainer,
            adapters,
            name,
            base_model=base_model,
            parent=parent,
            steps=metrics.steps,
            metrics=metrics.as_floats() | {"episodes_used": float(dataset.used), ROUND: float(current.number)},
            probe_ids=probe_ids,
        )
        trainer.finish()
    assert adapter is not None, "a watch is one process"
    del trainer
    forget_unused()
    return adapter
