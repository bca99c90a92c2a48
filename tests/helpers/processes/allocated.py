"""What a training step allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from made_samples import EXACT, make_samples
from torch.profiler import ProfilerActivity, profile

from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer


def step_settings(changes: Mapping[str, Any], length: int) -> TrainingSettings:
    """Of one step of one sample of so many tokens."""
    same = {"batch_size": 1, "num_epochs": 1, "algorithm": "grpo", "max_tokens_per_micro_batch": length}
    return EXACT.model_copy(update={**same, **changes})


def step_bytes(model: Path, changes: Mapping[str, Any], length: int) -> int:
    """The most bytes of tensors that exist at a time beside those before."""
    trainer, samples = LocalTrainer(model, step_settings(changes, length)), make_samples(1, length=length)
    trainer.reinforce(samples)
    return _allocated(lambda: trainer.reinforce(samples))


def _allocated(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    return max(accumulate(size for _, size in changes))
