"""The learning rate by optimiser step."""

from __future__ import annotations

from collections.abc import Callable

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
