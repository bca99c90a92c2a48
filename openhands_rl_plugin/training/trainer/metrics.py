"""Progress of a running call of the trainer, and its metrics at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from openhands_rl_plugin.config.rl import TrainingSettings


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
    ``trained_tokens`` and ``means`` are those of the diagnostics; ``seconds``: wall time before the last resumption.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    means: dict[str, float] = field(default_factory=dict)
    drift: float = 0.0
    skipped_steps: int = 0
    skipped_samples: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def skip(self, samples: int, *, whole: bool) -> None:
        """Count samples of a batch that had no gradient; ``whole``: there were no others."""
        self.skipped_samples += samples
        self.skipped_steps += whole

    def metrics(self, samples: int, staleness: float) -> TrainMetrics:
        """The metrics of the call."""
        steps = len(self.losses)
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
