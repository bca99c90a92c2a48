"""Training on stored episodes: the dataset, a trainer, the steps, the next adapter version with its probe.

One ``openhands-rl train`` is ``await policy_dataset(job, storage)``, then ``train_policy(job, dataset)``. No torch is
loaded before that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import LOCAL, RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe, from_extra
from openhands_rl_plugin.core.machine import forget_unused, free_memory
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Adapter, Probe, Sample
from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name
from openhands_rl_plugin.rollout.scoring import rescore
from openhands_rl_plugin.training.algorithms import ALGORITHMS, algorithm_of
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    TrainingDataset,
    build_dataset,
    load_episodes,
    nothing_learnt,
)
from openhands_rl_plugin.training.data.demonstrations import is_demonstration, load_tokenizer, tokenised
from openhands_rl_plugin.training.teacher import taught_dataset
from openhands_rl_plugin.trajectories.view import progress_bar

if TYPE_CHECKING:
    from openhands_rl_plugin.training.distributed.ranks import Ranks
    from openhands_rl_plugin.training.trainer.trainer import OnProgress, Trainer

PROBE_TOKENS = 128
"""Tokens of a probe: enough to show a wrong weight in the mean logprob difference, and one cheap forward pass."""


@dataclass(frozen=True)
class TrainingJob:
    """One training: its settings, base model and adapter.

    ``settings``: ``[rl.training]`` configures it, ``[rl.reward]`` judges. ``model``: the folder of the base model's
    weights; ``base_model``: its name in the episodes, empty for the only one that they have. ``name``: of the adapter,
    whose versions are in ``adapters``; ``parent``: the version to continue, ``None`` for the base model. ``ranks``: the
    processes that train together.
    """

    settings: RLSettings
    model: Path
    adapters: AdapterStore
    name: str
    base_model: str = ""
    parent: Adapter | None = None
    ranks: Ranks | None = None

    @property
    def folder(self) -> Path:
        """The folder of metrics and checkpoints. Raises ``ConfigError`` for an invalid adapter name."""
        return self.adapters.root / f"{check_name(self.name)}.training"


async def policy_dataset(
    job: TrainingJob, storage: TrajectoryStorage, where: TrajectoryFilter | None = None, *, dry_run: bool = False
) -> TrainingDataset:
    """The dataset for ``train_policy``: matching episodes of the base model and of the adapter's versions.

    Imitation and preferences also use imported ones, which get token ids by the model's chat template. ``dry_run``:
    scores are not stored, no teacher is asked. Raises ``ConfigError``, and ``TrainingError`` if nothing can be learnt.
    """
    training, where = job.settings.training, where or TrajectoryFilter()
    reward, algorithm = make_reward(job.settings.reward), algorithm_of(training)
    if not dry_run:
        await rescore(storage, reward, where, sub_agents=False)
    episodes = await load_episodes(
        storage,
        where,
        base_model=job.base_model,
        adapter=job.name,
        reward=reward,
        demonstrations=algorithm.kind != "reinforcement",
        presume=algorithm.kind == "imitation",
        unjudged=not algorithm.rewarded,
    )
    if algorithm.kind != "reinforcement" and any(map(is_demonstration, episodes.trajectories)):
        episodes = _with_token_ids(episodes, job.model)
    dataset = build_dataset(episodes, training)
    if not dry_run:
        dataset = await taught_dataset(dataset, episodes, training, job.model, job.parent)
    if not dataset.samples:
        raise TrainingError(nothing_learnt(training, dataset.excluded))
    return dataset


def _with_token_ids(episodes: Episodes, model: Path) -> Episodes:
    """Tokenise episodes without token ids with the chat template of ``model``. Raises ``TrainingError``."""
    tokenizer = load_tokenizer(str(model))
    if not tokenizer.chat_template:
        raise TrainingError(f"{model}: its tokenizer has no chat template; put the model's chat_template.jinja there")
    trajectories, failed = tokenised(episodes.trajectories, tokenizer)
    made = sum(map(is_demonstration, episodes.trajectories)) - failed.total()
    found = {"tokenised": made} | {f"no_template: {why}": count for why, count in failed.items()}
    return replace(episodes, trajectories=trajectories, excluded=episodes.excluded + Counter(found))


def train_policy(
    job: TrainingJob,
    dataset: TrainingDataset,
    *,
    on_note: Callable[[str], None] = lambda _: None,
    run: Path | None = None,
    measure: Callable[[Trainer], Mapping[str, float]] = lambda _: {},
    write_more: Callable[[Path], None] = lambda _: None,
) -> tuple[Adapter | None, Probe]:
    """Train by ``[rl.training]``, and write the next version of the adapter. A killed call resumes when it is repeated.

    Args:
        job: what is trained.
        dataset: not empty.
        on_note: gets what a user should know before training begins, a line each.
        run: a directory for metrics and checkpoints (default: the job's ``folder``).
        measure: more metrics for the version's manifest, of what was trained.
        write_more: writes more files into the version's directory.

    Returns the version, which only rank 0 has, and the trainer's logprobs to check a server against. Raises
    ``TrainingError`` and ``StorageError``.
    """
    training, base_model = job.settings.training, job.base_model or dataset.base_model or str(job.model)
    forget_unused()
    if training.method == "full" and job.ranks is None:
        check_fits(job.model, training)
    trainer = make_trainer(job.model, training, job.settings, base_model, job.parent)
    for line in trainer.notes:
        on_note(line)
    with progress_bar("training") as bar:

        def advanced(at: Mapping[str, float]) -> None:
            bar.update(int(at["done"]), int(at["total"]), note=f"loss {at['loss']:.3f}")

        found = fit(trainer, dataset, advanced, run=run or job.folder)
    metrics = {**found, "episodes_used": float(dataset.used), **measure(trainer)}
    version = create_version(
        trainer,
        job.adapters,
        job.name,
        base_model=base_model,
        parent=job.parent,
        steps=int(found["steps"]),
        metrics=metrics,
        probe_ids=dataset.samples[0].input_ids,
        write_more=write_more,
    )
    trainer.finish()
    return version


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


def plan_lines(job: TrainingJob, samples: Sequence[Sample], units: int) -> list[str]:
    """Sequences, steps and memory of a training, for a user. ``units``: how many of what ``batch_size`` counts."""
    training = job.settings.training
    tokens, trained = sum(len(each.input_ids) for each in samples), sum(sum(each.mask) for each in samples)
    steps = math.ceil(units / training.batch_size) * training.num_epochs
    sizes = f"sequences: {len(samples)}; tokens: {tokens:,}, of them trained {trained:,}; steps: {steps}"
    return [sizes, memory_line(job.model, training)]


def memory_line(model: Path, settings: TrainingSettings) -> str:
    """The memory that training needs, and the free memory."""
    if settings.engine != LOCAL:
        return f"memory: none here, {settings.engine} trains"
    need, free = memory_needed(model, settings) / 1e9, free_memory() / 1e9
    return f"memory: about {need:.2f} GB for weights and optimiser, plus activations; free: {free:.2f} GB"


def check_fits(model: Path, settings: TrainingSettings) -> None:
    """Raise ``TrainingError`` if ``memory_needed`` is more than this machine has free."""
    if memory_needed(model, settings) > free_memory():
        raise TrainingError(
            f'{model} does not fit: method = "{settings.method}", {memory_line(model, settings)}; train an adapter, '
            'method = "lora", or split it among processes with sharding = "layers"'
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
    with from_extra("train"):
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
    write_more: Callable[[Path], None] = lambda _: None,
) -> tuple[Adapter | None, Probe]:
    """Write the trained weights as the next version of ``name``, with a probe. A collective of all ranks.

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
        write_more: writes more files into the version's directory, after its weights.

    Returns the new version, which only rank 0 has, and the trainer's logprobs to check a server against. Raises
    ``StorageError`` when the version cannot be written; then nothing of it remains.
    """
    probe, adapter = trainer.probe(probe_ids[-PROBE_TOKENS:]), None
    if trainer.is_main_process:

        def write(directory: Path) -> None:
            trainer.save_adapter(directory)
            write_more(directory)

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
    trainer.set_policy_version(adapter)
    return adapter, probe
