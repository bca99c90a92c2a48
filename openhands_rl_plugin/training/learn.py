"""What every training has: a trainer, its notes, the steps, the next adapter version with its probe. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.config.training import LOCAL
from openhands_rl_plugin.core.errors import TrainingError, describe, from_extra
from openhands_rl_plugin.core.machine import free_memory
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.training.algorithms import ALGORITHMS
from openhands_rl_plugin.training.data.dataset import TrainingDataset

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.store import AdapterStore
    from openhands_rl_plugin.training.trainer.trainer import OnProgress, Trainer

PROBE_TOKENS = 128
"""Tokens of a probe: enough to show a wrong weight in the mean logprob difference, and one cheap forward pass."""


def memory_needed(model: Path, settings: TrainingSettings) -> int:
    """Bytes of weights, gradients and the optimiser's state, without activations. Raises ``TrainingError``.

    ``model``: a folder whose ``config.json`` is enough. A trained parameter takes 16: weight, gradient and two moments
    in float32; one of a 4-bit base model half a byte.
    """
    with from_extra("train"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            parameters = dict(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).named_parameters())
    except (OSError, ValueError) as error:
        raise TrainingError(f"cannot read {model}/config.json: {describe(error)} (no folder of a model?)") from error
    total = sum(each.numel() for each in parameters.values())
    if settings.method == "full":
        return 16 * total
    width = 0.5 if settings.method == "qlora" else 4 if settings.dtype == "float32" else 2
    endings = tuple(f".{each}.weight" for each in settings.target_modules)
    adapted = sum(sum(each.shape) for name, each in parameters.items() if name.endswith(endings))
    return int(width * total) + 16 * settings.lora_rank * adapted


def check_fits(model: Path, settings: TrainingSettings) -> None:
    """Raise ``TrainingError`` if ``memory_needed`` is more than this machine has free."""
    need, free = memory_needed(model, settings), free_memory()
    if need > free:
        raise TrainingError(
            f'{model} does not fit: method = "{settings.method}" needs {need / 1e9:.2f} GB, and {free / 1e9:.2f} GB '
            'are free: train an adapter, method = "lora", or split it among processes with sharding = "layers"'
        )


def make_trainer(
    model: Path, training: TrainingSettings, settings: RLSettings, base_model: str, adapter: Adapter | None
) -> Trainer:
    """A trainer by ``training``, which ``adapter`` starts, or the base model.

    ``model``: the folder of its weights, for an engine of this machine; ``base_model``: its name at the server of the
    policy. ``settings`` say where another engine is. Other packages add engines by the entry points
    ``openhands_rl_plugin.training_engines``: modules with ``make_trainer(training, settings, base_model, adapter)`` and
    ``check_settings(training)``.
    Raises ``ConfigError`` and ``TrainingError``.
    """
    training.check_engine()
    if training.engine != LOCAL:
        return registry.find("training_engines", training.engine).make_trainer(training, settings, base_model, adapter)
    from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

    return LocalTrainer(model, training, adapter=adapter)


def fit(
    trainer: Trainer, dataset: TrainingDataset, on_progress: OnProgress | None = None, *, run: Path | None = None
) -> dict[str, float]:
    """Train on the dataset by its algorithm.

    Args:
        trainer: holds the weights and the optimiser.
        dataset: not empty.
        on_progress: called after every optimiser step.
        run: a directory for metrics and checkpoints; a killed call resumes from it.

    Raises ``TrainingError``, also where no step had a gradient, or ``StorageError``.
    """
    match ALGORITHMS[dataset.algorithm].kind:
        case "imitation":
            metrics = trainer.sft(dataset.samples, on_progress, run=run)
        case "preference":
            metrics = trainer.prefer(dataset.pairs, on_progress, run=run)
        case "reinforcement":
            metrics = trainer.reinforce(dataset.samples, on_progress, run=run)
    if metrics["steps"] <= metrics["unmoved"]:
        trainer.finish()
        raise TrainingError(f"nothing was learnt: none of {metrics['samples']:.0f} sequences had a gradient")
    return metrics


def create_version(
    trainer: Trainer,
    store: AdapterStore,
    name: str,
    *,
    base_model: str,
    parent: Adapter | None,
    steps: int,
    metrics: dict[str, float],
    probe_ids: Sequence[int],
    beside: Callable[[Path], None] = lambda _: None,
) -> tuple[Adapter | None, Probe]:
    """Write what was trained as the next version of ``name``, with a probe beside it. A collective of all ranks.

    Args:
        trainer: holds what was trained.
        store: where versions are kept.
        name: of the adapter, without a version.
        base_model: the base model, by the name that servers use.
        parent: the version that training started from; ``None`` for the base model.
        steps: optimiser steps since ``parent``. ``Adapter.step`` counts the steps of the whole lineage: the parent's
            ``step`` plus these.
        metrics: for the manifest.
        probe_ids: token ids of a recorded text; the last ``PROBE_TOKENS`` of them are probed.
        beside: writes more files into the version's directory, after its weights.

    Returns the new version, which only rank 0 has, and the trainer's logprobs to check a server against. Raises
    ``StorageError`` when the version cannot be written; then nothing of it remains.
    """
    probe, adapter = trainer.probe(probe_ids[-PROBE_TOKENS:]), None
    if trainer.is_main_process:

        def write(directory: Path) -> None:
            trainer.save_adapter(directory)
            beside(directory)

        adapter = store.create(
            name,
            write,
            base_model=base_model,
            parent=parent.name if parent is not None else None,
            step=steps + (parent.step if parent is not None else 0),
            metrics=metrics,
            probe=probe,
        )
    else:
        trainer.hand_over()
    trainer.became(adapter)
    return adapter, probe


def learn(
    trainer: Trainer,
    dataset: TrainingDataset,
    store: AdapterStore,
    name: str,
    *,
    base_model: str,
    parent: Adapter | None,
    on_progress: OnProgress | None = None,
    run: Path | None = None,
) -> tuple[dict[str, float], Adapter | None, Probe]:
    """``fit``, then ``create_version`` from its metrics, then delete the checkpoints of the call.

    The arguments are those of the two; the first sample of the dataset is the probe's text.
    """
    metrics = fit(trainer, dataset, on_progress, run=run)
    adapter, probe = create_version(
        trainer,
        store,
        name,
        base_model=base_model,
        parent=parent,
        steps=int(metrics["steps"]),
        metrics=metrics | {"episodes_used": float(dataset.used)},
        probe_ids=dataset.samples[0].input_ids,
    )
    trainer.finish()
    return metrics, adapter, probe
