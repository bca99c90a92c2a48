"""``openhands-rl train STORE --verifier``: an adapter that estimates P(success) of an episode."""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from openhands_rl_plugin.cli.options.ending import ENDING
from openhands_rl_plugin.cli.options.fields import given_fields, settings_from
from openhands_rl_plugin.cli.options.versions import starting_point
from openhands_rl_plugin.cli.train import TrainingRun, memory_line, print_note, training_progress
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.statistics import Estimate

if TYPE_CHECKING:
    from openhands_rl_plugin.core.types import Adapter
    from openhands_rl_plugin.training.distributed.ranks import Ranks
    from openhands_rl_plugin.training.verifier.data import VerifierDataset, VerifierExample
    from openhands_rl_plugin.training.verifier.prompt import VerifierPrompts
    from openhands_rl_plugin.training.verifier.report import VerifierReport
    from openhands_rl_plugin.training.verifier.train import TrainedVerifier


class VerifierTraining(TrainingRun):
    """Trains a verifier and evaluates it on held-out tasks."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None, config: RLSettings) -> None:
        from openhands_rl_plugin.training.verifier.card import tasks_trained_on

        super().__init__(args, ranks, config)
        if self._training.method != "lora":
            raise ConfigError(f"--method {self._training.method} trains no verifier; use lora")
        if args.publish:
            self._training.check_servable()
        if args.reward or args.reward_options:
            raise ConfigError("--reward: a verifier is trained on labels; name their source with --label")
        if "algorithm" in given_fields(args, TrainingSettings):
            raise ConfigError("--algorithm: a verifier is always fine-tuned; leave it out")
        self._settings = settings_from(args, config.verifier)
        label = self._settings.label
        self._reward: Reward | None = None if label == "resolved" else build("rewards", label)
        self._parent = starting_point(self._adapters, self._name, args.start)
        self._seen = tasks_trained_on(self._parent)

    def run(self) -> int:
        """Train, or print the plan with ``--dry-run``; then print the results on held-out tasks."""
        try:
            from openhands_rl_plugin.models.generator.threads import prepare_threads

            prepare_threads()
            from openhands_rl_plugin.training.verifier.data import VerifierDataset
            from openhands_rl_plugin.training.verifier.prompt import prompts_for
            from openhands_rl_plugin.training.verifier.report import REPORT_FILE
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "transformers", "train") from error
        prompts = prompts_for(str(self._args.model), self._settings.max_length)
        dataset = self._from_rank_0(TypeAdapter(VerifierDataset), lambda: ENDING.run(self._read(prompts)))
        self._print_plan(dataset)
        if self._args.dry_run:
            return 0
        adapter, trained = self._train(dataset, prompts)
        if adapter is None:
            return 0
        print("\n".join([f"{adapter.name}:", *report_lines(trained.report)]))
        print(f"  {adapter.path}/{REPORT_FILE}")
        self._publish(adapter, trained.probe)
        return 0

    async def _read(self, prompts: VerifierPrompts) -> VerifierDataset:
        from openhands_rl_plugin.training.verifier.data import verifier_dataset

        async with self._open_store() as storage:
            return await verifier_dataset(
                storage,
                self._where,
                prompts,
                self._settings,
                reward=self._reward,
                seed=self._training.seed,
                taught=self._seen,
            )

    def _print_plan(self, dataset: VerifierDataset) -> None:
        from openhands_rl_plugin.training.verifier.card import task_digest

        print(f"{self._name} from {self._start}, a verifier")
        causes = dataset.left_out.causes()
        print(f"  training: {_counts(dataset.training)}; left out:{'' if causes else ' none'}")
        for cause in causes:
            print(f"    {cause}")
        print(f"  held out: {_counts(dataset.held_out)}")
        again = {example.label.task for example in dataset.training if task_digest(example.label.task) in self._seen}
        if self._parent is not None and again:
            print(f"  {len(again)} tasks trained {self._parent.name} or an earlier version and are not held out")
        longest = max(len(example.prompt) + 1 for example in dataset.training)
        tokens = sum(len(example.prompt) + 1 for example in dataset.training)
        steps = math.ceil(len(dataset.training) / self._training.batch_size) * self._training.num_epochs
        print(f"  tokens: {tokens:,}, of them trained {len(dataset.training):,}; the longest episode has {longest:,}")
        print(f"  steps: {steps} ({self._training.num_epochs} epochs)")
        print(memory_line(self._args.model, self._training, longest), flush=True)

    def _train(self, dataset: VerifierDataset, prompts: VerifierPrompts) -> tuple[Adapter | None, TrainedVerifier]:
        """The new version, which rank 0 alone has, and the trained verifier."""
        try:
            from openhands_rl_plugin.training.verifier.train import train_verifier
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "torch", "train") from error
        with self._scratch() as scratch:
            with training_progress() as advanced:
                trained = train_verifier(
                    self._args.model,
                    dataset,
                    self._training,
                    self._settings,
                    scratch,
                    prompts=prompts,
                    parent=self._parent,
                    on_progress=advanced,
                    on_note=print_note,
                    run=self._run_directory,
                    ranks=self._ranks,
                )
            if not self._leads:
                trained.pending.delete()
                return None, trained
            adapter = self._adapters.create(
                self._name,
                lambda directory: _copy(scratch, directory),
                base_model=self._args.base_model or self._args.model.resolve().name,
                parent=self._parent.name if self._parent else None,
                step=trained.metrics.steps + (self._parent.step if self._parent else 0),
                metrics=trained.metrics.as_floats() | trained.report.as_floats(),
            )
        self._adapters.keep_probe(adapter, trained.probe)  # for a later ``adapters publish``
        trained.pending.delete()
        return adapter, trained

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A directory of rank 0, which all ranks know."""
        if self._ranks is not None and self._ranks.rank > 0:
            yield Path(self._ranks.broadcast_text(""))
            return
        self._adapters.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".verifier-", dir=self._adapters.root) as scratch:
            if self._ranks is not None:
                self._ranks.broadcast_text(scratch)
            yield Path(scratch)


def report_lines(report: VerifierReport) -> list[str]:
    """The figures on held-out tasks, for a terminal."""
    lines = [f"  held out: {report.successes} of {report.episodes} episodes of {report.tasks} tasks succeeded"]
    auc = "no episodes of both classes to rank" if report.auc is None else _interval(report.auc)
    lines.append(f"  AUC {auc}; p(YES) + p(NO) {report.label_mass:.3f}")
    lines.append(f"  Brier {report.brier:.4f}, ECE {report.ece:.4f}")
    if report.calibration.slope != 1.0 or report.calibration.offset != 0.0:
        lines[-1] += (
            f" calibrated by slope {report.calibration.slope:.3g} and offset {report.calibration.offset:+.3g} "
            f"(before: {report.raw_brier:.4f}, {report.raw_ece:.4f})"
        )
    lines += [
        f"    {one.low:.1f}-{one.high:.1f}: {one.count} episodes, said {one.score:.2f}, were {one.success:.2f}"
        for one in report.bins
    ]
    lines += [
        f"  Best@{one.k} {_interval(one.best_at_k)}, Pass@{one.k} {_interval(one.pass_at_k)}, "
        f"mean {_interval(one.mean)} ({one.mean.n} tasks)"
        for one in report.selection
    ]
    return lines


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _counts(examples: tuple[VerifierExample, ...]) -> str:
    successes = sum(example.label.success for example in examples)
    tasks = len({example.label.task for example in examples})
    truncated = sum(example.truncated for example in examples)
    cut = f", {truncated} truncated" if truncated else ""
    return f"{successes} successes and {len(examples) - successes} failures of {tasks} tasks{cut}"


def _copy(source: Path, directory: Path) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, directory / file.name)
