"""Progress of a running call of the trainer, its metrics, and the experiment tracker that they are sent to."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, TrainingError, boundary
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.training.losses.losses import Diagnostics


def learning_rates(settings: TrainingSettings, call: range) -> Callable[[int], float]:
    """The learning rate by optimiser step: transformers' ``get_scheduler`` with a warm-up that starts above zero.

    ``call``: the steps that the call plans. The warm-up is over the trainer's first steps; "linear" and "cosine" decay
    to zero at the end of a call, and a later call of the same trainer starts at the peak again.
    """
    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    shift = max(call.start, settings.warmup_steps) - settings.warmup_steps - 1
    unused = torch.optim.SGD([torch.zeros(1)])  # required by get_scheduler; only the schedule is used
    scheduler = get_scheduler(name, unused, settings.warmup_steps + 1, call.stop - shift)
    assert isinstance(scheduler, LambdaLR)
    factor = scheduler.lr_lambdas[0]
    return lambda step: settings.learning_rate * factor(step - shift)


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a call after step ``done`` of ``total``.

    The other fields are of that step: ``loss``, ``ratio``, ``approx_kl``, ``entropy`` are means over its trained
    tokens.
    """

    done: int
    total: int
    loss: float
    grad_norm: float
    ratio: float
    approx_kl: float
    entropy: float


@dataclass
class TrainMetrics:
    """Metrics of one call. Losses and norms are means over its steps, diagnostics over its tokens.

    ``tokens``: tokens of the samples in forward passes, over all epochs; ``trained_tokens``: those with a loss;
    ``skipped_samples`` had an advantage of zero, so they count in the mean but need no computation; ``skipped_steps``
    consisted of such samples only, and ``unmoved`` steps had no gradient. ``drift``: mean absolute difference, in nats,
    of the recorded logprobs from the trainer's before the first step. ``kl``: divergence from the base model, where a
    KL term is used. ``weight``: mean importance weight of the correction for stale rollouts. ``staleness``: mean number
    of versions between the newest one and the one that sampled. ``seconds``: wall time.

    They are part of checkpoints, so a resumed run has the same metrics as one that was not interrupted.
    """

    steps: int = 0
    skipped_steps: int = 0
    unmoved: int = 0
    samples: int = 0
    skipped_samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    ratio: float = 1.0
    approx_kl: float = 0.0
    clip_share: float = 0.0
    entropy: float = 0.0
    drift: float = 0.0
    kl: float = 0.0
    weight: float = 1.0
    staleness: float = 0.0
    seconds: float = 0.0

    def count(self, tokens: int, loss: float, norm: float | None, found: Diagnostics) -> None:
        """Count one optimiser step by samples of so many ``tokens``; its gradient's ``norm`` may be unknown."""
        if not self.steps:
            # Before the first step the difference from the recorded logprobs does not come from training.
            self.drift, self.first_loss = found.drift, loss
        self.steps, self.unmoved, self.last_loss = self.steps + 1, self.unmoved + (norm == 0.0), loss
        self.loss += (loss - self.loss) / self.steps
        self.grad_norm += ((norm or 0.0) - self.grad_norm) / self.steps
        whole = asdict(Diagnostics(self.trained_tokens, **{name: getattr(self, name) for name in _MEANS}) + found)
        self.tokens, self.trained_tokens = self.tokens + tokens, whole["tokens"]
        for name in _MEANS:
            setattr(self, name, whole[name])

    @property
    def tokens_per_second(self) -> float:
        """Training throughput, forward and backward."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_floats(self) -> dict[str, float]:
        """For an adapter's manifest."""
        values = {name: float(value) for name, value in asdict(self).items()}
        return values | {"tokens_per_second": self.tokens_per_second}


_MEANS = ("ratio", "approx_kl", "clip_share", "entropy", "kl", "weight")

log = redacting_logger(__name__)

PROJECT = "openhands-rl"
"""The project of a run, unless W&B's own variable WANDB_PROJECT names another."""


class Tracker:
    """The back end of accelerate that the settings name, for one run, whose errors do not end the training.

    The first error is logged, then it is not used again; its output goes to stderr. A run of the same ``fingerprint``
    and directory is resumed. Raises ``TrainingError`` when it cannot start.
    """

    def __init__(self, settings: TrainingSettings, fingerprint: str, directory: Path | None = None) -> None:
        self._tracker: Any = None
        if settings.tracker == "none":
            return
        title = re.sub(r"[^\w.-]", "-", directory.stem if directory is not None else "training")
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "tracker"), redirect_stdout(sys.stderr):
                self._tracker = _started(settings, f"{title[:50]}-{fingerprint[:12]}", directory)
        except CaughtFailure as caught:
            offline = "WANDB_MODE=offline or " if settings.tracker == "wandb" else ""
            raise TrainingError(
                f"{settings.tracker} cannot begin a run ({caught.failure.message}): set {offline}[rl.training] tracker "
                '= "none"'
            ) from caught

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step; ``step`` becomes ``global_step``, a reserved name in some back ends."""
        renamed = {"global_step" if name == "step" else name: value for name, value in values.items()}
        self._attempt(lambda tracker: tracker.log(renamed, step=step))

    def close(self) -> None:
        """End the run."""
        self._attempt(lambda tracker: tracker.finish())

    def _attempt(self, act: Callable[[Any], object]) -> None:
        if self._tracker is None:
            return
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "tracker"), redirect_stdout(sys.stderr):
                act(self._tracker)
        except CaughtFailure as caught:
            self._tracker = None
            log.warning("tracking stops, the training continues: %s", caught.failure.message)


def _started(settings: TrainingSettings, name: str, directory: Path | None) -> Any:
    PartialState()  # accelerate's loggers need it
    kind, project, config = LOGGER_TYPE_TO_CLASS[settings.tracker], PROJECT, settings.model_dump(mode="json")
    options: dict[str, Any] = {}
    if settings.tracker == "mlflow":
        options = {"run_name": name}
    elif settings.tracker == "trackio":
        options = {"name": name, "config": config, "resume": "allow", "embed": False}
    elif settings.tracker == "wandb":
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        options = {"name": name, "id": name, "resume": "allow", "reinit": "create_new", "config": config}
        # The terminal's content and the working directory stay private.
        private = wandb.Settings(console="off", disable_git=True, disable_code=True)
        options |= {"dir": directory, "settings": private}
    tracker = kind(project, *((str(directory or "."),) if kind.requires_logging_directory else ()), **options)
    tracker.start()
    if "config" not in options:
        tracker.store_init_configuration({key: str(value) for key, value in config.items()})
    return tracker
