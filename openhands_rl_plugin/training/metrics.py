"""What training reports: progress while it runs, metrics when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TrainProgress:
    """Where a call stands after step ``done`` of ``total``; ``loss`` is that step's token mean."""

    done: int
    total: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class TrainMetrics:
    """What one call trained. Losses, norms and diagnostics are means over its steps.

    ``tokens``: tokens of the samples that went through the model, all epochs together; ``trained_tokens``: those of
    them that carried loss; ``skipped_samples`` had an advantage of zero, so that they count in the mean but need no
    computation; ``skipped_steps`` consisted of such samples only. ``seconds``: wall time.
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
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Training throughput, forward and backward."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_floats(self) -> dict[str, float]:
        """For an adapter's manifest."""
        return {name: float(value) for name, value in asdict(self).items()}
