"""Trains an outcome verifier: labelled episodes in, an adapter with its card and its report out.

The loss covers the label's first token only, directly after ``<judgement>``; the same token is scored. The report is
computed with the written files, loaded as in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from openhands_rl_plugin.config.rl import TrainingSettings, VerifierSettings
from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.files import file_sha256
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.types import Adapter, Probe, Sample
from openhands_rl_plugin.models.adapters.adapter_config import read_adapter_config
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
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
from openhands_rl_plugin.rewards.verifier.data import VerifierDataset, VerifierExample
from openhands_rl_plugin.rewards.verifier.prompt import VerifierPrompts
from openhands_rl_plugin.training.data.batch import pack
from openhands_rl_plugin.training.data.demonstrations import load_tokenizer
from openhands_rl_plugin.training.distributed.ranks import Ranks
from openhands_rl_plugin.training.learn import PROBE_TOKENS, report_notes
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.trainer.metrics import RunCheckpoint, TrainMetrics
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer, OnProgress


class VerifierModel(TrainablePolicy):
    """A base model with a verifier's adapter. Any thread may call it; calls wait for each other.

    ``tokens_per_pass``: tokens of a micro-batch, common prefixes counted once; a longer prompt is a micro-batch of its
    own. Raises ``TrainingError`` when the model or the adapter cannot be used, ``ConfigError`` when the directory has
    no verifier.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: str | Path | None = None,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        tokens_per_pass: int = 16_384,
    ) -> None:
        self.card = VerifierCard.load(directory)
        if weights_sha256(directory) != self.card.sha256:
            raise TrainingError(f"{directory / WEIGHTS_FILE} was changed since it was made (sha256 differs)")
        base = str(model or self.card.model)
        self.prompts = VerifierPrompts(load_tokenizer(base), self.card.max_length)
        if (self.prompts.yes, self.prompts.no) != (self.card.yes, self.card.no):
            raise TrainingError(f"{base} has another tokenizer than the model that {directory} was trained on")
        super().__init__(base, _settings_of(directory, self.card).model_copy(update={"dtype": dtype}))
        self.load(directory)
        self._tokens_per_pass = tokens_per_pass
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
        verdicts: dict[Ids, VerifierOutput] = {}
        with self._turn:
            for group in pack([_sample(prompt) for prompt in {*map(Ids, prompts)}], self._tokens_per_pass):
                sequences = [sample.input_ids for sample in group]
                verdicts.update(zip(sequences, self._verdicts(sequences), strict=True))
        return [verdicts[Ids(prompt)] for prompt in prompts]

    def _verdicts(self, sequences: Sequence[Ids]) -> list[VerifierOutput]:
        # One row per prompt: few, because a prompt has at least a few hundred tokens.
        logits = self.last_logits(sequences)
        labels = logits[:, [self.card.yes, self.card.no]]
        margins = labels[:, 0] - labels[:, 1]
        masses = (labels.logsumexp(1) - logits.logsumexp(1)).exp()
        return [VerifierOutput(*pair) for pair in zip(margins.tolist(), masses.tolist(), strict=True)]


def weights_sha256(directory: Path) -> str:
    """Hexadecimal digest of an adapter's weights. Raises ``TrainingError``."""
    path = directory / WEIGHTS_FILE
    try:
        return file_sha256(path)
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {describe(error)}") from error


def _sample(prompt: Ids) -> Sample:
    return Sample(trajectory_id="", leaf=0, input_ids=prompt, mask=Mask(), logprobs=Floats())


def _settings_of(directory: Path, card: VerifierCard) -> TrainingSettings:
    shape = read_adapter_config(directory)
    try:
        return TrainingSettings.model_validate(
            {
                "lora_rank": shape.r,
                "lora_alpha": shape.lora_alpha,
                "lora_variant": shape.variant,
                "target_modules": shape.layers,
                "adapt_experts": card.adapt_experts,
                "sharding": "none",
            }
        )
    except ValidationError as error:
        raise TrainingError(f"the adapter in {directory} cannot be used here: {describe(error)}") from error


OnJudged = Callable[[int, int], None]
"""Called with the number of scored held-out episodes and their total."""

_AT_ONCE = 32


@dataclass(frozen=True)
class TrainedVerifier:
    """``probe``: checks a server of the adapter; ``pending``: checkpoints to delete when everything is saved."""

    card: VerifierCard
    report: VerifierReport
    metrics: TrainMetrics
    probe: Probe
    pending: list[RunCheckpoint]


def train_verifier(
    model: Path,
    dataset: VerifierDataset,
    training: TrainingSettings,
    settings: VerifierSettings,
    directory: Path,
    *,
    prompts: VerifierPrompts,
    parent: Adapter | None = None,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] | None = None,
    on_judged: OnJudged | None = None,
    run: Path | None = None,
    ranks: Ranks | None = None,
) -> TrainedVerifier:
    """Fill an existing directory with an adapter, its card and its report.

    ``parent``: the verifier to continue from; no task of its ``tasks_trained_on`` may be held out. ``run``: as for
    ``LocalTrainer.sft``. ``ranks``: the processes that train together, each of which scores a shard of the held-out
    episodes; rank 0 writes ``directory``, on a file system that all ranks share. Raises ``TrainingError``,
    ``StorageError``.
    """
    ranks = ranks or Ranks()
    taught = tasks_trained_on(parent) | {task_digest(example.label.task) for example in dataset.training}
    trainer = LocalTrainer(model, training, adapter=parent)
    if on_note is not None:
        report_notes(trainer, on_note)
    pending = trainer.pending
    metrics = trainer.sft([example.sample() for example in dataset.training], on_progress, run=run)
    probe = trainer.probe(dataset.training[0].prompt[-PROBE_TOKENS:])
    if ranks.rank == 0:
        trainer.save_adapter(directory)
        _card(model, directory, prompts, taught, training).save(directory)
    del trainer
    forget_unused()
    ranks.broadcast(None)  # a barrier: the files are written
    judged = _judge(VerifierModel(directory, dtype=training.dtype), dataset.held_out, on_judged, ranks)
    report = report_of(judged, settings)
    card = VerifierCard.load(directory).model_copy(update={"calibration": report.calibration})
    ranks.assert_equal("verdicts", report.model_dump_json())  # and a barrier: all have read the card
    if ranks.rank == 0:
        card.save(directory)
        (directory / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return TrainedVerifier(card, report, metrics, probe, pending)


def _card(
    model: Path, directory: Path, prompts: VerifierPrompts, taught: frozenset[str], training: TrainingSettings
) -> VerifierCard:
    return VerifierCard(
        model=str(model.resolve()),
        sha256=weights_sha256(directory),
        max_length=prompts.max_length,
        yes=prompts.yes,
        no=prompts.no,
        trained_on=tuple(sorted(taught)),
        adapt_experts=training.adapt_experts,
    )


def _judge(
    model: VerifierModel, examples: Sequence[VerifierExample], on_judged: OnJudged | None, ranks: Ranks
) -> list[ScoredEpisode]:
    """Score in task order, so attempts at one task share a micro-batch; each rank scores a contiguous part."""
    ordered = sorted(examples, key=lambda example: example.label.task)
    begin, end = (len(ordered) * at // ranks.size for at in (ranks.rank, ranks.rank + 1))
    verdicts = torch.zeros(len(ordered), 2, dtype=torch.float64)
    for start in range(begin, end, _AT_ONCE):
        some = ordered[start : min(start + _AT_ONCE, end)]
        found = model.judge([example.prompt for example in some])
        verdicts[start : start + len(some)] = torch.tensor([(one.margin, one.mass) for one in found])
        if on_judged is not None:
            on_judged(start + len(some) - begin, end - begin)
    ranks.all_reduce([verdicts])
    return [
        ScoredEpisode(example.label.task, margin, example.label.success, mass)
        for example, (margin, mass) in zip(ordered, verdicts.tolist(), strict=True)
    ]
