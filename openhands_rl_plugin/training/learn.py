"""Training on stored episodes: the dataset, a trainer, the steps, the next adapter version with its probe.

One ``openhands-rl train`` is ``await policy_dataset(job, storage)``, then ``train_policy(job, dataset)``. The import
of this module loads no torch.
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
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe, from_extra
from openhands_rl_plugin.core.judgements import UNJUDGED, preferences
from openhands_rl_plugin.core.machine import forget_unused, free_memory
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import Adapter, Failure, Probe, Sample, Score, StopReason, Trajectory
from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name
from openhands_rl_plugin.rollout.scoring import JudgesLabels, judge_all, known_score, rescore
from openhands_rl_plugin.training.algorithms import (
    ALGORITHMS,
    algorithm_of,
    credited_samples,
    is_recorded,
    needs_logprobs,
    off_policy_sampling,
    sampled_nodes,
    samples_of,
)
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    PreferencePair,
    TrainingDataset,
    is_failed,
    is_interrupted,
    is_overlong,
    is_searched,
    nothing_learnt,
    preference_pairs,
    regrouped,
    select_for_sft,
    until_secret,
)
from openhands_rl_plugin.training.data.demonstrations import (
    demonstration_reward,
    is_demonstration,
    is_imported,
    load_tokenizer,
    tokenised,
)
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


async def load_episodes(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    *,
    base_model: str,
    adapter: str,
    reward: Reward,
    demonstrations: bool = False,
    presume: bool = False,
    unjudged: bool = False,
) -> Episodes:
    """The stored episodes that ``base_model`` (empty: the only one) sampled, alone or with any version of ``adapter``.

    With ``demonstrations`` also imported ones of any policy, with the outcome in their record; with
    ``presume`` those without a label count as chosen to be imitated: 1.0; with ``unjudged`` those without a reward
    are there, too, and those that failed of the model. People's preferences between two of them come with them, and
    those two also without a reward.
    Episodes of an evaluation split are excluded unless ``where`` names the split. An episode without a score of the
    reward is scored here, unless it is a sub-agent's; the score is not stored. A reward that ``JudgesLabels`` goes by
    the labels as they are now. Raises ``ConfigError`` for episodes of several base models, ``TrainingError`` for none.
    """
    own: list[Trajectory] = []
    known: dict[str, Score | Failure] = {}
    excluded: Counter[str] = Counter()
    by_labels, models = isinstance(reward, JudgesLabels), Counter[str]()
    async for trajectory, scores in storage.find(where):
        imported, policy = demonstrations and is_imported(trajectory), trajectory.policy
        other = policy.adapter not in (None, adapter) or base_model not in ("", policy.base_model)
        if not (imported or other):
            models[policy.base_model] += 1
        if where.only_measures(trajectory.task.split):
            excluded["held_out"] += 1
        elif other and not imported:
            excluded["other_policy"] += 1
        elif trajectory.failure is not None and is_failed(trajectory, rewarded=not unjudged):
            excluded[f"failed: {trajectory.failure.kind.value}"] += 1
        else:
            own.append(trajectory)
            score = None if by_labels or imported else known_score(reward, trajectory, scores)
            if imported and not by_labels:
                value = demonstration_reward(trajectory, scores, reward.version)
                if value is None and presume and not (scores or sub_agent_of(trajectory.task)):
                    value = 1.0
                    excluded["presumed"] += 1
                if value is not None:
                    score = Score(trajectory_id=trajectory.id, reward=value, reward_version=reward.version)
            if score is not None:
                known[trajectory.id] = score
    if len(models) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in models.most_common())
        raise ConfigError(f"the episodes are of several base models: {counts}; choose one with --base-model")
    if not (base_model or models or own):
        raise TrainingError(f"no stored episode of {adapter} or a base model matches; see `openhands-rl list`")
    labels = await storage.labels([trajectory.id for trajectory in own])
    if isinstance(reward, JudgesLabels):
        of: dict[str, list[Label]] = {trajectory.id: [] for trajectory in own}
        for label in labels:
            of.get(label.trajectory_id, []).append(label)
        found = {identity: reward.from_labels(identity, each) for identity, each in of.items()}
        known |= {identity: score for identity, score in found.items() if score and score.reward is not None}
    unscored = [each for each in own if each.id not in known and not sub_agent_of(each.task)]
    outcomes = await judge_all(reward, unscored)
    known |= {each.id: outcome for each, outcome in zip(unscored, outcomes, strict=True)}
    ids = frozenset(each.id for each in own)
    labelled = {both: better for both, better in preferences(labels).items() if both <= ids}
    named = ids if unjudged else {each for both in labelled for each in both}
    valid: list[tuple[Trajectory, float | None]] = []
    for each in own:
        outcome = known.get(each.id)
        if isinstance(outcome, Score) and outcome.reward is not None:
            valid.append((each, outcome.reward))
        elif each.id in named:
            valid.append((each, None))
        elif outcome is None:
            excluded["sub_agents"] += 1
        else:
            why = outcome.message if isinstance(outcome, Failure) else f"{outcome.reward_version} gave none"
            excluded[f"no_reward: {why.removeprefix('GraderError: ')}"] += 1
    trajectories, returns = zip(*valid, strict=True) if valid else ((), ())
    return Episodes(trajectories, returns, excluded, labelled, base_model or next(iter(models), ""))


def build_dataset(episodes: Episodes, settings: TrainingSettings, *, regroup: bool = True) -> TrainingDataset:
    """The dataset for the algorithm of ``settings``; it may be empty.

    ``regroup``: compare all episodes of a task, a version and a strategy, else those of one group.
    """
    usable = _usable(episodes, settings, regroup=regroup)
    trajectories = usable.trajectories
    rewards = [value or 0.0 for value in usable.rewards]  # for pairs and a teacher some have none
    pairs: list[PreferencePair] = []
    match algorithm_of(settings).kind:
        case "imitation":
            good = [trajectories[at] for at in select_for_sft(trajectories, rewards, settings)]
            samples = [sample for trajectory in good for sample in samples_of(trajectory, need_logprobs=False)]
        case "preference":
            pairs = preference_pairs(trajectories, usable.rewards, settings, usable.labelled)
            samples = [sample for pair in pairs for sample in (*pair.chosen, *pair.rejected)]
        case "reinforcement":
            samples = credited_samples(trajectories, rewards, settings)
    trained = {sample.trajectory_id for sample in samples}
    used = len(trained)
    algorithm = algorithm_of(settings)
    as_sampled = algorithm.kind == "reinforcement" and algorithm.rewarded and settings.tree == "path"
    return TrainingDataset(
        algorithm=settings.algorithm,
        samples=tuple(samples),
        used=used,
        excluded=usable.excluded + Counter(no_signal=len(trajectories) - used),
        pairs=tuple(pairs),
        searched=sum(is_searched(each) for each in trajectories if each.id in trained) if as_sampled else 0,
        base_model=episodes.base_model,
    )


def _may_be_shortened(settings: TrainingSettings) -> bool:
    """Whether the algorithm gives each answer the weight of its episode, so that one can be left out of the sum.

    Rewards to go need all later steps, and a preference compares whole episodes.
    """
    whole = settings.step_rewards == "episode" and not settings.state_weight
    return whole and algorithm_of(settings).kind != "preference"


def _usable(episodes: Episodes, settings: TrainingSettings, *, regroup: bool) -> Episodes:
    """The episodes that the algorithm of ``settings`` may use, and counts of the others.

    An episode that timed out after its success is a success: SFT may use it, algorithms that compare may not.
    """
    algorithm, shortens = algorithm_of(settings), _may_be_shortened(settings)
    kind = algorithm.kind
    excluded = Counter(episodes.excluded)
    kept: list[tuple[Trajectory, float | None]] = []
    for trajectory, value in zip(episodes.trajectories, episodes.rewards, strict=True):
        short = until_secret(trajectory) if shortens else trajectory
        whole = is_recorded(short, need_logprobs=needs_logprobs(settings))
        if value is None and kind != "preference" and algorithm.rewarded:
            excluded[f"no_reward: {UNJUDGED}"] += 1  # there for a preference, which is not what is trained on now
        elif not (whole if algorithm.rewarded else sampled_nodes(short)):
            excluded["no_tokens"] += 1
        elif trajectory.stop is StopReason.UNFINISHED or (kind != "imitation" and is_interrupted(trajectory)):
            excluded["unfinished"] += 1
        elif is_overlong(trajectory, settings):
            excluded["overlong"] += 1
        elif kind == "reinforcement" and (how := off_policy_sampling(trajectory)):
            excluded[f"off_temperature: {how}"] += 1
        else:
            excluded["shortened"] += short is not trajectory
            kept.append((regrouped(short) if regroup else short, value))
    trajectories, returns = zip(*kept, strict=True) if kept else ((), ())
    return Episodes(trajectories, returns, excluded, episodes.labelled)


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

    No server has it yet: ``AdapterPublisher.publish`` brings it into use.

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
