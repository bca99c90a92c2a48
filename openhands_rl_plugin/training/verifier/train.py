"""Trains an outcome verifier: labelled episodes in, an adapter with its card and its report out.

The loss covers the label's first token only, directly after ``<judgement>``; the same token is scored. The report is
computed with the written files, loaded as in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from openhands_rl_plugin.config.rl import TrainingSettings, VerifierSettings
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.training.distributed.ranks import Ranks, SingleProcess
from openhands_rl_plugin.training.learn import tell_notes
from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.metrics import TrainMetrics
from openhands_rl_plugin.training.trainer.resume import PendingCheckpoint
from openhands_rl_plugin.training.trainer.trainer import OnProgress
from openhands_rl_plugin.training.verifier.card import VerifierCard, task_digest, tasks_trained_on
from openhands_rl_plugin.training.verifier.data import VerifierDataset, VerifierExample
from openhands_rl_plugin.training.verifier.model import VerifierModel, weights_sha256
from openhands_rl_plugin.training.verifier.prompt import VerifierPrompts
from openhands_rl_plugin.training.verifier.report import REPORT_FILE, ScoredEpisode, VerifierReport, report_of

OnJudged = Callable[[int, int], None]
"""Called with the number of scored held-out episodes and their total."""

PROBE_TOKENS = 128
_AT_ONCE = 32


@dataclass(frozen=True)
class TrainedVerifier:
    """``probe``: checks a server of the adapter; ``pending``: checkpoints to delete when everything is saved."""

    card: VerifierCard
    report: VerifierReport
    metrics: TrainMetrics
    probe: Probe
    pending: PendingCheckpoint


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
    ``LoraTrainer.sft``. ``ranks``: the processes that train together, each of which scores a shard of the held-out
    episodes; rank 0 writes ``directory``, on a file system that all ranks share. Raises ``TrainingError``,
    ``StorageError``.
    """
    ranks = ranks or SingleProcess()
    taught = tasks_trained_on(parent) | {task_digest(example.label.task) for example in dataset.training}
    trainer = LoraTrainer(model, training, adapter=parent)
    if on_note is not None:
        tell_notes(trainer, on_note)
    pending = trainer.pending
    metrics = trainer.sft([example.sample() for example in dataset.training], on_progress, run=run)
    probe = trainer.probe(dataset.training[0].prompt[-PROBE_TOKENS:])
    if ranks.rank == 0:
        trainer.save_adapter(directory)
        _card(model, directory, prompts, taught, training).save(directory)
    del trainer
    forget_unused()
    ranks.broadcast_text("")  # a barrier: the files are written
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
