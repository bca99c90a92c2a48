"""TRL's ``GRPOTrainer``, given rows in the place of prompts. The package is imported here only."""

from __future__ import annotations

import importlib
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe
from openhands_rl_plugin.training.packages import check_package
from openhands_rl_plugin.training.trl.rows import TrainedRow, inputs_of, numbers_of


class Steps(Protocol):
    """Who follows the optimiser steps, counted from 0."""

    def begins(self, at: int) -> None:
        """Before the first row of a step."""
        ...

    def computed(self, row: TrainedRow, logprobs: Tensor, entropies: Tensor) -> None:
        """[K] each, of the trained tokens of a row."""
        ...

    def updates(self) -> None:
        """Before the weights change, with the gradient in place. May raise."""
        ...

    def ended(self, at: int, norm: float) -> None:
        """The weights and moments are those after the step; ``norm``: of its gradient, before it was clipped."""
        ...


@dataclass(frozen=True)
class Trained:
    """What is trained: ``model`` with an adapter, its base and tokenizer, the optimiser, the rate of each step."""

    model: nn.Module
    base: PreTrainedModel
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]


def train_rows(
    trained: Trained, batches: Sequence[Sequence[TrainedRow | None]], arguments: Mapping[str, object], steps: Steps
) -> None:
    """Make a step for each batch, all of which have as many rows. ``arguments``: of ``GRPOConfig``.

    Raises ``TrainingError`` for what TRL refuses, and what ``steps`` raises.
    """
    trl = _package()
    forward = vars(trained.base).get("forward")
    with _own_random_numbers(), _without_advice(), tempfile.TemporaryDirectory(prefix="trl-") as directory:
        try:
            _rows_trainer(trl, trained, batches, dict(arguments) | {"output_dir": directory}, steps).train()
        finally:
            trained.model.eval()
            vars(trained.base).pop("forward", None)  # TRL put its own output layer before it
            if forward is not None:
                trained.base.forward = forward


def _package() -> Any:
    check_package("trl")
    try:
        return importlib.import_module("trl")
    except ImportError as error:
        raise ConfigError(f"TRL {version('trl')} cannot be imported here: {describe(error)}") from error


def _rows_trainer(
    trl: Any,
    trained: Trained,
    batches: Sequence[Sequence[TrainedRow | None]],
    arguments: Mapping[str, object],
    steps: Steps,
) -> Any:
    rows = [row for batch in batches for row in batch]

    class RowsTrainer(trl.GRPOTrainer):
        """Its loop, loss, optimiser step and clipping; what it would have generated is given."""

        def get_train_dataloader(self) -> Any:
            places = TensorDataset(torch.arange(len(rows)))
            loader = DataLoader(places, batch_size=1, collate_fn=lambda at: {"row": at[0][0]})
            return self.accelerator.prepare(loader)

        def floating_point_ops(self, inputs: object) -> int:
            return 0

        def _prepare_inputs(self, generation_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            self._row = rows[int(generation_batch["row"])]
            return inputs_of(self._row, self.accelerator.device)

        def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
            self._numbers = super()._get_per_token_logps_and_entropies(*given, **named)
            return self._numbers

        def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
            found = super()._compute_loss(model, inputs)
            if self._row is not None:
                steps.computed(self._row, *numbers_of(inputs, *self._numbers[:2]))
            return found

    config = trl.GRPOConfig(**_ALWAYS, **arguments, num_generations=len(batches[0]), max_steps=len(batches))
    config._n_gpu = min(config.n_gpu, 1)  # never torch's DataParallel
    try:
        made = RowsTrainer(
            model=trained.model,
            reward_funcs=_no_reward,
            args=config,
            train_dataset=importlib.import_module("datasets").Dataset.from_dict({"prompt": [""] * len(rows)}),
            processing_class=trained.tokenizer,
            callbacks=[_Listener(steps)],
            optimizers=(trained.optimizer, _schedule(trained)),
        )
    except (ImportError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise TrainingError(f"TRL {version('trl')} cannot train this model: {describe(error)}") from error
    made.remove_callback(PrinterCallback)
    return made


_ALWAYS: Mapping[str, object] = {
    "per_device_train_batch_size": 1,
    "beta": 0.0,
    "router_aux_loss_coef": 0.0,
    "gradient_checkpointing": False,  # the policy's own
    "bf16": False,
    "fp16": False,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "ddp_find_unused_parameters": False,
}
"""No term of its own in the loss; checkpoints and trackers are ours."""


class _Listener(TrainerCallback):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.begins(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.updates()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "grad_norm" in (logs := kwargs.get("logs") or {}):  # not the summary at the end
            self._steps.ended(state.global_step - 1, float(logs["grad_norm"]))


def _schedule(trained: Trained) -> LambdaLR:
    """The rates of the steps, whatever the optimiser's last call ended with."""
    for group in trained.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    return LambdaLR(trained.optimizer, trained.rate)


def _no_reward(**kwargs: object) -> list[float]:
    raise AssertionError("rows have their advantages")


@contextmanager
def _without_advice() -> Iterator[None]:
    """TRL's advice on loss types is about its own aggregation, and transformers' is about names of arguments."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    advisor = logging.getLogger("trl.trainer.grpo_trainer")
    level = advisor.level
    advisor.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advisor.setLevel(level)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """TRL seeds all generators of the process, which others use."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
