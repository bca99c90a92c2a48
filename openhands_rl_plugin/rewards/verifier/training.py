"""Trains an outcome verifier: labelled episodes in, an adapter with its card and its report out.

The loss covers the label's first token only, directly after ``<judgement>``; the same token is scored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.rl import LOCAL, TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Adapter, Probe, Sample
from openhands_rl_plugin.models.adapters.adapter_config import read_adapter_config
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, weights_sha256
from openhands_rl_plugin.rewards.verifier.card import (
    REPORT_FILE,
    ScoredEpisode,
    VerifierCard,
    VerifierOutput,
    VerifierReport,
    report_of,
    task_digest,
    tasks_trained_on,
)
from openhands_rl_plugin.rewards.verifier.data import VerifierDataset, VerifierExample, verifier_dataset
from openhands_rl_plugin.rewards.verifier.prompt import VerifierPrompts, prompts_for
from openhands_rl_plugin.training.data.dataset import TrainingDataset
from openhands_rl_plugin.training.data.packing import pack
from openhands_rl_plugin.training.distributed.ranks import Ranks
from openhands_rl_plugin.training.learn import TrainingJob, train_policy
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.policies.packed_model import PackedModel
from openhands_rl_plugin.training.trainer.trainer import Trainer

_TOKENS_PER_PASS = 16_384
"""Tokens of a micro-batch, common prefixes counted once; a longer prompt is a micro-batch of its own."""


class VerifierModel(TrainablePolicy):
    """A base model with a verifier's adapter. Any thread may call it; calls wait for each other.

    Raises ``TrainingError`` when the model or the adapter cannot be used, ``ConfigError`` when the directory has
    no verifier.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: str | Path | None = None,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    ) -> None:
        self.card = VerifierCard.load(directory)
        if weights_sha256(directory) != self.card.sha256:
            raise TrainingError(f"{directory / WEIGHTS_FILE} was changed since it was made (sha256 differs)")
        base = str(model or self.card.model)
        super().__init__(base, _settings_of(directory, self.card).model_copy(update={"dtype": dtype}))
        self.load(directory)
        self._turn = threading.Lock()

    @torch.no_grad()
    def judge(self, prompts: Sequence[tuple[int, ...]]) -> list[VerifierOutput]:
        """One output per prompt, in order. Raises ``TrainingError`` for a prompt that is too long for the model."""
        longest = max(map(len, prompts), default=0)
        if longest > self.longest:
            raise TrainingError(
                f"a prompt has {longest} tokens, but the model is made for {self.longest}; train the verifier with a "
                "smaller max_length"
            )
        found: dict[Ids, VerifierOutput] = {}
        with self._turn:
            for group in pack([_sample(prompt) for prompt in {*map(Ids, prompts)}], _TOKENS_PER_PASS):
                sequences = [sample.input_ids for sample in group]
                found.update(zip(sequences, verdicts(self, sequences, self.card.yes, self.card.no), strict=True))
        return [found[Ids(prompt)] for prompt in prompts]


def verdicts(policy: PackedModel, prompts: Sequence[Ids], yes: int, no: int) -> list[VerifierOutput]:
    """One output per prompt of a micro-batch, in order."""
    # One row per prompt: few, because a prompt has at least a few hundred tokens.
    logits = policy.last_logits(prompts)
    labels = logits[:, [yes, no]]
    margins = labels[:, 0] - labels[:, 1]
    masses = (labels.logsumexp(1) - logits.logsumexp(1)).exp()
    return [VerifierOutput(*pair) for pair in zip(margins.tolist(), masses.tolist(), strict=True)]


def _sample(prompt: Ids, name: str = "") -> Sample:
    return Sample(trajectory_id=name, leaf=0, input_ids=prompt, mask=Mask(), logprobs=Floats())


def _settings_of(directory: Path, card: VerifierCard) -> TrainingSettings:
    shape = read_adapter_config(directory)
    try:
        return TrainingSettings.model_validate(
            {
                "lora_rank": shape.r,
                "lora_alpha": shape.lora_alpha,
                "lora_variant": shape.variant,
                "target_modules": shape.layers,
                "sharding": "none",
            }
        )
    except ValidationError as error:
        raise TrainingError(f"the adapter in {directory} cannot be used here: {describe(error)}") from error


async def verifier_data(
    job: TrainingJob, storage: TrajectoryStorage, where: TrajectoryFilter | None = None
) -> VerifierDataset:
    """The data of ``train_verifier``: episodes of all policies, labelled by ``[rl.verifier]``.

    No task that the job's ``parent`` was trained on is held out. Raises ``ConfigError``, and as ``verifier_dataset``.
    """
    settings, training = job.settings.verifier, job.settings.training
    if (training.method, training.engine) != ("lora", LOCAL):
        how = f"training.method={training.method} with training.engine={training.engine}"
        raise ConfigError(f"{how} trains no verifier; use lora and {LOCAL}")
    reward = None if settings.label == "resolved" else build("rewards", settings.label)
    where = where or TrajectoryFilter()
    before, prompts = tasks_trained_on(job.parent), prompts_for(str(job.model), settings.max_length)
    return await verifier_dataset(storage, where, prompts, settings, reward=reward, seed=training.seed, taught=before)


def train_verifier(
    job: TrainingJob, dataset: VerifierDataset, *, on_note: Callable[[str], None] = lambda _: None
) -> tuple[Adapter | None, Probe]:
    """Run ``train_policy`` on the labels, and write a card and a report into the version's folder.

    Each of the job's ``ranks`` scores a shard of the held-out episodes. Raises ``TrainingError``, ``StorageError``.
    """
    settings, reports = job.settings.verifier, list[VerifierReport]()
    prompts = prompts_for(str(job.model), settings.max_length)
    taught = tasks_trained_on(job.parent) | {task_digest(example.label.task) for example in dataset.training}

    def measure(trainer: Trainer) -> dict[str, float]:
        reports.append(report_of(_judge(trainer.policy, dataset.held_out, prompts, job.ranks or Ranks()), settings))
        return reports[0].as_floats()

    def describe_verifier(directory: Path) -> None:
        card = VerifierCard(
            model=str(job.model.resolve()),
            sha256=weights_sha256(directory),
            max_length=prompts.max_length,
            yes=prompts.yes,
            no=prompts.no,
            calibration=reports[0].calibration,
            trained_on=tuple(sorted(taught)),
        )
        card.save(directory)
        (directory / REPORT_FILE).write_text(reports[0].model_dump_json(indent=1) + "\n", encoding="utf-8")

    imitated = TrainingDataset("sft", dataset.samples, dataset.units, base_model=job.model.resolve().name)
    return train_policy(job, imitated, on_note=on_note, measure=measure, write_more=describe_verifier)


@torch.no_grad()
def _judge(
    policy: PackedModel, examples: Sequence[VerifierExample], prompts: VerifierPrompts, ranks: Ranks
) -> list[ScoredEpisode]:
    samples = [_sample(Ids(example.prompt), str(at)) for at, example in enumerate(examples)]
    mine, idle = ranks.shard(pack(samples, _TOKENS_PER_PASS if policy.packing.packed else 1))
    found = torch.zeros(len(examples), 2, dtype=torch.float64)
    for number, group in enumerate((*mine, *idle)):
        scored = verdicts(policy, [sample.input_ids for sample in group], prompts.yes, prompts.no)
        for sample, verdict in zip(group, scored, strict=True) if number < len(mine) else ():
            found[int(sample.trajectory_id)] = torch.tensor(verdict, dtype=torch.float64)
    ranks.all_reduce([found])
    return [
        ScoredEpisode(example.label.task, margin, example.label.success, mass)
        for example, (margin, mass) in zip(examples, found.tolist(), strict=True)
    ]
