"""How the learning rate goes over the steps of a call."""

from __future__ import annotations

import math

from openhands_rl_plugin.config.rl import TrainingSettings


def learning_rate_at(step: int, call: range, settings: TrainingSettings) -> float:
    """Of the step after ``step`` others; ``call``: the numbers of the steps that the call plans, this one included.

    A linear warm-up over the trainer's first steps, then the schedule: "linear" and "cosine" go down to zero at the
    end of a call, and a call that goes on with a trainer starts at the top again.
    """
    warmup = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    if settings.schedule == "constant" or step < settings.warmup_steps:
        return settings.learning_rate * warmup
    top = max(call.start, settings.warmup_steps)
    done = min(1.0, (step - top) / max(1, call.stop - top))
    left = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * left
