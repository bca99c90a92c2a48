"""Trains an adapter by TRL's GRPO trainer: our samples, advantages and schedule, its loop, loss and optimiser step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.distributed.ranks import all_reduce_metrics
from openhands_rl_plugin.training.losses.logprobs import Diagnostics
from openhands_rl_plugin.training.losses.losses import Imitation, MicroBatch, MicroBatchLoss
from openhands_rl_plugin.training.losses.micro_batches import TrainingSample
from openhands_rl_plugin.training.packages import check_package
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.policies.packing_check import Packing
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.metrics import RunningMetrics, TrainMetrics
from openhands_rl_plugin.training.trainer.preparation import micro_batch_logprobs
from openhands_rl_plugin.training.trainer.trainer import OnProgress, OnStep, weighted
from openhands_rl_plugin.training.trl.grpo import Trained, train_rows
from openhands_rl_plugin.training.trl.rows import (
    TrainedRow,
    likelihood_rows,
    loss_arguments,
    policy_rows,
    slots,
    temperature_of,
)


class TRLTrainer(LoraTrainer):
    """One adapter of one base model, whose optimiser steps TRL makes.

    ``base_model``: the name of the model in ``model_path`` at its server. Raises ``ConfigError`` without a TRL that
    fits, ``TrainingError`` for an adapter of another base model.
    """

    ENGINE = "trl"

    def __init__(
        self, model_path: str | Path, settings: TrainingSettings, base_model: str, *, adapter: Adapter | None = None
    ) -> None:
        check_package(self.ENGINE)
        if found := [name for name in _OTHER_WRAPPERS if os.environ.get(name, "") == "true"]:
            raise ConfigError(
                f'engine = "trl" is made for one process, or several with a whole model each, and {found[0]} is set: '
                "choose MULTI_GPU or NO in accelerate's configuration"
            )
        if adapter is not None and adapter.base_model != base_model:
            raise TrainingError(
                f"{adapter.name} is an adapter of base model {adapter.base_model!r}, and {base_model!r} is trained: "
                "start from base, or set [rl.serving] model"
            )
        super().__init__(model_path, settings, adapter=adapter)
        self._model_path = Path(model_path)

    def prefer(
        self, pairs: Sequence[PreferencePair], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        """Refused: GRPO's loss has no pairs."""
        raise TrainingError('engine = "trl" does not learn from pairs: set engine = "local"')

    def _open(self, model_path: str | Path, settings: TrainingSettings) -> TrainablePolicy:
        return _PlainPolicy(model_path, settings)

    def _run(
        self,
        steps: Sequence[tuple[int, list[TrainingSample]]],
        loss: MicroBatchLoss,
        tally: RunningMetrics,
        advanced: OnStep,
    ) -> None:
        from openhands_rl_plugin.training.verifier.prompt import load_tokenizer

        course = _Course(self, steps, loss, tally, advanced)
        if batches := course.batches():
            assert isinstance(self._adapter, _PlainPolicy)
            first, size = self.step, self._ranks.size
            trained = Trained(
                model=self._adapter.peft,
                base=self._adapter.base,
                tokenizer=load_tokenizer(str(self._model_path)),
                optimizer=self._optimizer,
                rate=lambda at: self._learning_rate(first + at),
            )
            made = slots(batches, size)
            arguments = {
                "gradient_accumulation_steps": len(made[0]) // size,
                "learning_rate": self.settings.learning_rate,
                "max_grad_norm": self.settings.max_grad_norm,
                "seed": self.settings.seed,
                "temperature": temperature_of([row.item for batch in batches for row in batch]),
                "use_cpu": self._adapter.device.type == "cpu",
                **loss_arguments(self.settings, imitates=isinstance(loss, Imitation)),
            }
            train_rows(trained, made, arguments, course)
        course.skip_rest()


_OTHER_WRAPPERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
"""Variables of ``accelerate launch`` for models in parts, whose checkpoints are another thing."""


class _Course:
    """The steps of a call as TRL makes them; ``Steps``. Batches without a gradient are passed over."""

    def __init__(
        self,
        trainer: TRLTrainer,
        steps: Sequence[tuple[int, list[TrainingSample]]],
        loss: MicroBatchLoss,
        tally: RunningMetrics,
        advanced: OnStep,
    ) -> None:
        self._trainer, self._loss, self._tally, self._advanced = trainer, loss, tally, advanced
        self._steps = [(number, batch, *weighted(batch, loss)) for number, batch in steps]
        self._next = 0
        self._total, self._found = 0.0, Diagnostics()
        self._compared = False

    def batches(self) -> list[list[TrainedRow]]:
        """The rows of every step that is not skipped."""
        if isinstance(self._loss, Imitation):
            return [likelihood_rows(live, weights) for _, _, live, weights in self._steps if live]
        settings = self._trainer.settings
        return [policy_rows(live, weights, settings) for _, _, live, weights in self._steps if live]

    def begins(self, at: int) -> None:
        """Pass over what is skipped before it."""
        self._skip()
        self._total, self._found = 0.0, Diagnostics()
        self._trainer._notes.begin_step(self._steps[self._next][0])
        self._trainer._rate = self._trainer._learning_rate(self._trainer.step)

    @torch.no_grad()
    def computed(self, row: TrainedRow, logprobs: Tensor, entropies: Tensor) -> None:
        """What is said of a step is computed by our loss from TRL's logprobs.

        The first row of a call is compared with the policy's own pass: an architecture whose output layer TRL computes
        otherwise would be trained wrongly. Raises ``TrainingError``.
        """
        if not self._compared:
            self._compare(row, logprobs)
        one = MicroBatch([row.item], logprobs.float(), entropies.float(), logprobs.new_tensor([row.weight]).float())
        share, found = self._loss(one)
        self._total, self._found = self._total + share.item(), self._found + found
        self._trainer._notes.take(one, self._loss)

    def updates(self) -> None:
        """Raise ``TrainingError`` before a step that would break the weights."""
        trainer = self._trainer
        self._total, self._found = all_reduce_metrics(trainer._ranks, self._total, self._found)
        gradients = [each.grad.sum() for each in trainer.parameters.values() if each.grad is not None]
        if not (math.isfinite(self._total) and (not gradients or math.isfinite(torch.stack(gradients).sum().item()))):
            raise TrainingError(
                f"step {trainer.step + 1}: the loss is {self._total}, or its gradient is not finite; the weights are "
                "unchanged. Lower learning_rate, or check the recorded logprobs"
            )

    def ended(self, at: int, norm: float) -> None:
        """Count the step, and tell of it."""
        number, batch, live, _ = self._steps[self._next]
        self._next += 1
        self._trainer._count(live, self._total, norm, self._found, self._tally)
        self._tally.skip(len(batch) - len(live), whole=False)
        self._advanced(number, batch, self._found)

    def skip_rest(self) -> None:
        """Pass over the skipped steps after the last one."""
        self._skip()

    def _compare(self, row: TrainedRow, logprobs: Tensor) -> None:
        own, _ = micro_batch_logprobs(self._trainer._policy, [row.item])
        difference = (own - logprobs).abs().mean().item()
        if not difference <= self._trainer._policy.probe_tolerance:
            raise TrainingError(
                f"TRL's logprobs of the first sequence differ from the model's own by {difference:.2g} nats (mean), so "
                'that nothing was trained: set engine = "local"'
            )
        self._compared = True

    def _skip(self) -> None:
        while self._next < len(self._steps) and not self._steps[self._next][2]:
            number, batch, _, _ = self._steps[self._next]
            self._next += 1
            self._tally.skip(len(batch), whole=True)
            self._advanced(number, batch, Diagnostics())


class _PlainPolicy(TrainablePolicy):
    """A model with the attention of its own, because TRL gives it whole sequences."""

    @property
    def peft(self) -> Any:
        """With the adapter."""
        return self._peft

    @property
    def base(self) -> Any:
        """Without it."""
        return self._base

    def notes(self) -> list[str]:
        """Who trains, in the place of what packing says."""
        return ["trained by TRL's GRPOTrainer, a sequence a micro-batch", *super().notes()[1:]]

    @property
    def servers(self) -> tuple[str, ...]:
        """Those of the architecture, which may be packed elsewhere."""
        return self._servers

    def _check(self, plain: Sequence[Tensor]) -> None:
        own = self._base.config._attn_implementation
        super()._check(plain)
        self._servers = super().servers
        if self.packing.packed:
            self._base.set_attn_implementation(own or "eager")
            self.packing = Packing(False, "TRL computes whole sequences")
