"""Progress of a running call of the trainer, and its metrics at the end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, TrainingError, boundary
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind


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


@dataclass(frozen=True)
class TrainMetrics:
    """Metrics of one call. Losses and norms are means over its steps, diagnostics over its tokens.

    ``tokens``: tokens of the samples in forward passes, over all epochs; ``trained_tokens``: those with a loss;
    ``skipped_samples`` had an advantage of zero, so they count in the mean but need no computation; ``skipped_steps``
    consisted of such samples only. ``drift``: mean absolute difference, in nats, of the recorded logprobs from the
    trainer's before the first step. ``kl``: divergence from the base model, where a KL term is used. ``weight``: mean
    importance weight of the correction for stale rollouts. ``staleness``: mean number of versions between the newest
    one and the one that sampled. ``seconds``: wall time.
    """

    steps: int
    skipped_steps: int
    samples: int
    skipped_samples: int
    tokens: int
    trained_tokens: int
    first_loss: float
    last_loss: float
    loss: float
    grad_norm: float
    ratio: float
    approx_kl: float
    clip_share: float
    entropy: float
    drift: float
    kl: float
    weight: float
    staleness: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Training throughput, forward and backward."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_floats(self) -> dict[str, float]:
        """For an adapter's manifest."""
        values = {name: float(value) for name, value in asdict(self).items()}
        return values | {"tokens_per_second": self.tokens_per_second}


@dataclass
class RunningMetrics:
    """Sums over one call so far.

    They are part of checkpoints, so a resumed run has the same metrics as one that was not interrupted.
    ``trained_tokens`` and ``means`` are those of the diagnostics; ``seconds``: wall time before the last resumption;
    ``unmoved``: steps without any gradient.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    means: dict[str, float] = field(default_factory=dict)
    drift: float = 0.0
    skipped_steps: int = 0
    skipped_samples: int = 0
    unmoved: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def skip(self, samples: int, *, whole: bool) -> None:
        """Count samples of a batch that had no gradient; ``whole``: there were no others."""
        self.skipped_samples += samples
        self.skipped_steps += whole

    def metrics(self, samples: int, staleness: float) -> TrainMetrics:
        """The metrics of the call."""
        steps = len(self.losses) if self.unmoved < len(self.losses) else 0
        return TrainMetrics(
            steps=steps,
            skipped_steps=self.skipped_steps,
            samples=samples,
            skipped_samples=self.skipped_samples,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            first_loss=self.losses[0] if steps else 0.0,
            last_loss=self.losses[-1] if steps else 0.0,
            loss=sum(self.losses) / steps if steps else 0.0,
            grad_norm=sum(self.norms) / steps if steps else 0.0,
            ratio=self.means.get("ratio", 1.0),
            approx_kl=self.means.get("approx_kl", 0.0),
            clip_share=self.means.get("clip_share", 0.0),
            entropy=self.means.get("entropy", 0.0),
            drift=self.drift,
            kl=self.means.get("kl", 0.0),
            weight=self.means.get("weight", 1.0),
            staleness=staleness,
            seconds=self.seconds,
        )


log = redacting_logger(__name__)

PROJECT = "openhands-rl"
"""The project of a run, unless W&B's own variable WANDB_PROJECT names another."""


class Tracker(Protocol):
    """Records one training run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def finish(self, *, failed: bool) -> None:
        """End the run."""
        ...


class NoTracker:
    """Records nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def finish(self, *, failed: bool) -> None:
        """Do nothing."""


class SafeTracker:
    """A back end of accelerate whose errors do not end the training: the first is logged, then it is not used again.

    Output of the back end is redirected to stderr.
    """

    def __init__(self, tracker: GeneralTracker) -> None:
        self._tracker: Any = tracker

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step; ``step`` becomes ``global_step``, a reserved name in some back ends."""
        renamed = {"global_step" if name == "step" else name: value for name, value in values.items()}
        with self._errors_logged() as tracker:
            if tracker is not None:
                tracker.log(renamed, step=step)

    def finish(self, *, failed: bool) -> None:
        """End the run; W&B alone can mark it as failed."""
        with self._errors_logged() as tracker, redirect_stdout(sys.stderr):
            if tracker is not None and failed and tracker.name == "wandb":
                tracker.tracker.finish(exit_code=1)
            elif tracker is not None:
                tracker.finish()

    @contextmanager
    def _errors_logged(self) -> Iterator[Any]:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "tracker"):
                yield self._tracker
        except CaughtFailure as caught:
            self._tracker = None
            log.warning("tracking stops, the training continues: %s", caught.failure.message)


@contextmanager
def tracked(settings: TrainingSettings, fingerprint: str, directory: Path | None = None) -> Iterator[Tracker]:
    """The tracker that the settings name, for one run; a run of the same ``fingerprint`` and directory is resumed.

    Raises ``TrainingError`` when the tracker cannot start.
    """
    title = re.sub(r"[^\w.-]", "-", directory.stem if directory is not None else "training")
    tracker = _started(settings, f"{title[:50]}-{fingerprint[:12]}", directory)
    failed = True
    try:
        yield tracker
        failed = False
    finally:
        tracker.finish(failed=failed)


def _started(settings: TrainingSettings, name: str, directory: Path | None) -> Tracker:
    if settings.tracker == "none":
        return NoTracker()
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "tracker"), redirect_stdout(sys.stderr):
            PartialState()  # accelerate's loggers need it
            kind = LOGGER_TYPE_TO_CLASS[settings.tracker]
            project = os.environ.get("WANDB_PROJECT", PROJECT) if settings.tracker == "wandb" else PROJECT
            config = settings.model_dump(mode="json")
            options = _options(settings.tracker, name, config, directory)
            place = (str(directory or "."),) if kind.requires_logging_directory else ()
            tracker = kind(project, *place, **options)
            tracker.start()
            if "config" not in options:
                tracker.store_init_configuration({key: str(value) for key, value in config.items()})
            return SafeTracker(tracker)
    except CaughtFailure as caught:
        offline = "WANDB_MODE=offline or " if settings.tracker == "wandb" else ""
        raise TrainingError(
            f"{settings.tracker} cannot begin a run ({caught.failure.message}): set {offline}[rl.training] tracker = "
            '"none"'
        ) from caught


def _options(tracker: str, name: str, config: dict[str, Any], directory: Path | None) -> dict[str, Any]:
    """A back end's arguments besides the project: the run's name, and those for resuming it."""
    if tracker == "trackio":
        return {"name": name, "config": config, "resume": "allow", "embed": False}
    if tracker == "mlflow":
        return {"run_name": name}
    if tracker != "wandb":
        return {}
    import wandb  # pyright: ignore[reportMissingImports]  # an extra

    return {
        **{"name": name, "id": name, "resume": "allow", "reinit": "create_new", "config": config, "dir": directory},
        # The terminal's content and the working directory stay private.
        "settings": wandb.Settings(console="off", disable_git=True, disable_code=True),
    }
