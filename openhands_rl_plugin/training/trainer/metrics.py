"""The learning rate of a call of the trainer, its metrics, their file and tracker, and its checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, StorageError, TrainingError, boundary, describe
from openhands_rl_plugin.core.files import PRIVATE, replacing, write_file
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.distributed.ranks import Ranks
from openhands_rl_plugin.training.losses import SUMS


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


def metrics_of(tally: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a call by what its steps added up to (``add_step``), for an adapter's manifest.

    Losses and norms are means over steps, the ``SUMS`` of losses over tokens. ``tokens``: those of the samples in
    forward passes, over all epochs; ``trained_tokens``: those with a loss; ``skipped_samples`` had an advantage of
    zero, so they count in the mean but need no computation; ``skipped_steps`` consisted of such samples only, and
    ``unmoved`` steps had no gradient. ``drift``: mean absolute difference, in nats, of the recorded logprobs from the
    trainer's before the first step. ``staleness``: mean number of versions between the newest one and the one
    that sampled. ``seconds``: wall time.
    """
    steps, trained = tally["steps"] or 1.0, tally["trained_tokens"] or 1.0
    means = {name: tally[name] / steps for name in ("loss", "grad_norm")}
    means |= {name: tally[name] / trained for name in _SUMMED}
    return {**tally, **means, "tokens_per_second": tally["tokens"] / tally["seconds"] if tally["seconds"] else 0.0}


_SUMMED = tuple(name for name in SUMS if name not in ("tokens", "drift"))
_COUNTED = ("steps", "skipped_steps", "unmoved", "samples", "skipped_samples", "tokens", "trained_tokens")
NOTHING: Mapping[str, float] = dict.fromkeys(
    (*_COUNTED, "first_loss", "last_loss", "loss", "grad_norm", *_SUMMED, "drift", "staleness", "seconds"), 0.0
)
"""The tally of a call without a step."""


def add_step(tally: dict[str, float], tokens: int, loss: float, norm: float | None, sums: Mapping[str, float]) -> None:
    """Add one optimiser step by samples of so many ``tokens``; its gradient's ``norm`` may be unknown."""
    if not tally["steps"]:
        # Before the first step the difference from the recorded logprobs does not come from training.
        tally |= {"first_loss": loss, "drift": sums["drift"] / (sums["tokens"] or 1.0)}
    more = {"steps": 1.0, "unmoved": float(norm == 0.0), "tokens": float(tokens), "trained_tokens": sums["tokens"]}
    more |= {"loss": loss, "grad_norm": norm or 0.0, **{name: sums[name] for name in _SUMMED}}
    tally |= {name: tally[name] + value for name, value in more.items()} | {"last_loss": loss}


PROJECT = "openhands-rl"
"""The project of a tracked run."""


class RunLog:
    """``metrics.jsonl`` in a run's folder, readable by the owner only, and the tracker of accelerate.

    ``done``: the lines of the file that a killed call has written, and its later ones are dropped. Raises
    ``TrainingError`` for a tracker that cannot start, ``StorageError`` for a file that cannot be written.
    """

    def __init__(self, settings: TrainingSettings, directory: Path | None, done: int) -> None:
        self._file = None if directory is None else directory / METRICS_FILE
        if self._file is not None:
            known = self._file.read_text(encoding="utf-8").splitlines(keepends=True) if self._file.exists() else []
            write_file(self._file, "".join(known[:done]), PRIVATE, parents=True)
        self._tracker = None if settings.tracker == "none" else _tracker(settings, directory)

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Note the metrics of a step."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if self._tracker is not None:
            self._tracker.log({name: value for name, value in record.items() if name != "step"}, step=step)

    def close(self) -> None:
        """End the tracked run."""
        if self._tracker is not None:
            self._tracker.finish()


def _tracker(settings: TrainingSettings, directory: Path | None) -> GeneralTracker:
    # The terminal's content and the working directory stay private.
    os.environ |= {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true"}
    try:
        with boundary(FailureKind.INFRASTRUCTURE, settings.tracker), redirect_stdout(sys.stderr):
            PartialState()  # accelerate's loggers need it
            kind: Any = LOGGER_TYPE_TO_CLASS[settings.tracker]
            tracker = kind(PROJECT, *([str(directory or ".")] if kind.requires_logging_directory else []))
            tracker.start()
            tracker.store_init_configuration({key: str(value) for key, value in settings})
            return tracker
    except CaughtFailure as caught:
        raise TrainingError(
            f'{settings.tracker} cannot begin a run ({caught.failure.message}): set [rl.training] tracker = "none"'
        ) from caught


STATE_FILE = "trainer_state.pt"


def save_checkpoint(file: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and numbers; at any moment it is either the old or the new file. Raises ``StorageError``."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(file, PRIVATE) as draft:
            torch.save(state, draft)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write {file}: {describe(error)}; free some space or choose another path") from error


def load_checkpoint(file: Path) -> dict[str, Any]:
    """What ``save_checkpoint`` wrote, on the CPU. Raises ``TrainingError``."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise TrainingError(f"cannot read the training state {file}: {describe(error)}") from error


class RunCheckpoint:
    """The checkpoint of one call: a folder with a shard of each rank, or with the whole state of rank 0.

    The folder's name has the ``fingerprint`` of the call and the steps done; it gets that name when all shards are in
    it, and only then the one before is removed. Every method is a collective: all ranks must call it.
    """

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks, *, sharded: bool) -> None:
        self._folder, self._name, self._ranks = directory / "checkpoint", fingerprint[:16], ranks
        self._shard, self._shards = (ranks.rank, ranks.size) if sharded else (0, 1)
        self._writes = sharded or ranks.rank == 0

    def resume(self) -> dict[str, Any] | None:
        """This rank's shard of the newest checkpoint of this call that rank 0 finds. Raises ``TrainingError``."""
        shutil.rmtree(self._folder / _DRAFT, ignore_errors=True)
        newest = self._ranks.broadcast(max(self._folder.glob(f"{self._name}-*"), default=None))
        if newest is None:
            return None
        if (count := len([*newest.iterdir()])) != self._shards:
            raise TrainingError(
                f"{newest} was saved by {count} processes with a shard of the weights each, and there are "
                f"{self._shards}: start the run like that to resume it, or remove it to begin again"
            )
        return load_checkpoint(newest / str(self._shard))

    def save(self, state: Mapping[str, Any], done: int) -> None:
        """Save the state after ``done`` steps of the call. Raises ``StorageError``."""
        step = self._folder / f"{self._name}-{done:08d}"
        if self._writes:
            save_checkpoint(self._folder / _DRAFT / str(self._shard), state)
        self._ranks.assert_equal("steps done", step.name)  # from here on all shards are there
        if self._ranks.rank == 0:
            (self._folder / _DRAFT).rename(step)
            for other in self._folder.iterdir():
                if other != step:
                    shutil.rmtree(other, ignore_errors=True)

    def delete(self) -> None:
        """Remove the checkpoint, once the trained weights are saved."""
        self._ranks.assert_equal("steps done", "all")
        if self._ranks.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


_DRAFT = "draft"
