"""Progress of a running call of the trainer, its metrics and their tracker, and its checkpoints.

A checkpoint is one file of rank 0, or one shard of each rank. ``fingerprint`` identifies the run: data, settings and
starting point. A checkpoint of another run is never resumed.

The files are safetensors. ``torch.distributed.checkpoint`` is not used: its ``.metadata`` file is a pickle, and it
replaces the files of a checkpoint one by one, so that a killed process may leave neither the old state nor the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, StorageError, TrainingError, boundary, describe
from openhands_rl_plugin.core.files import PRIVATE, replacing
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind, Sample
from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.distributed.ranks import Ranks
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


Checkpoint = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and counters."""

STATE_FILE = "trainer_state.safetensors"


def save_checkpoint(directory: Path, tensors: dict[str, Tensor], counters: dict[str, str]) -> None:
    """Write ``directory/STATE_FILE``; at any moment it is either the old or the new one. Raises ``StorageError``."""
    target = directory / STATE_FILE
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(target, PRIVATE) as draft:
            save_file(state, draft, counters)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write {target}: {describe(error)}; free some space or choose another path"
        ) from error


def load_checkpoint(directory: Path, *, tensors: bool = True) -> Checkpoint:
    """The tensors, if they are wanted, and the counters that ``save_checkpoint`` wrote. Raises ``TrainingError``."""
    source = directory / STATE_FILE
    try:
        with safe_open(source, framework="pt") as file:
            return {name: file.get_tensor(name) for name in (file.keys() if tensors else ())}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"cannot read the training state {source}: {describe(error)}") from error


SHARDS = "parts"
"""The directory of checkpoints; its name is part of the stored format."""


class RunCheckpoint:
    """The checkpoints of one call, ``parts/STEP/RANK-of-RANKS``: a shard of each rank, or 1-of-1, the whole of rank 0.

    A step is valid when all its shards are there, of one run. The step before it is removed only then, so that there is
    always a valid one. Every method is a collective: all ranks must call it.
    """

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks, *, sharded: bool) -> None:
        self._steps, self._fingerprint, self._ranks = directory / SHARDS, fingerprint, ranks
        self._shard, self._shards = (ranks.rank, ranks.size) if sharded else (0, 1)
        self._writes = sharded or ranks.rank == 0

    def resume(self) -> Checkpoint | None:
        """This rank's shard of the newest checkpoint of this run that rank 0 finds. Raises ``TrainingError``."""
        found = self._ranks.broadcast(self._newest())
        if not found:
            return None
        if len(found) != self._shards:
            raise TrainingError(
                f"{found[0].parent} was saved by {len(found)} processes with a shard of the weights each, and there "
                f"are {self._shards}: start the run like that to resume it, or remove it to begin again"
            )
        return load_checkpoint(found[self._shard])

    def save(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Save the state after ``done`` steps of the call. Raises ``StorageError``."""
        step = self._steps / f"{done:08d}"
        if self._writes:
            make_directory(step)
            mine = {**counters, "fingerprint": self._fingerprint, "done": str(done)}
            save_checkpoint(step / f"{self._shard + 1}-of-{self._shards}", tensors, mine)
        self._ranks.assert_equal("steps done", step.name)
        if self._ranks.rank == 0:
            for other in step.parent.iterdir():
                if other != step:
                    shutil.rmtree(other, ignore_errors=True)

    def delete(self) -> None:
        """Remove the checkpoint, once the trained weights are saved."""
        self._ranks.assert_equal("steps done", "all")
        if self._ranks.rank == 0:
            shutil.rmtree(self._steps, ignore_errors=True)

    def _newest(self) -> list[Path]:
        """The folders of the shards of the newest step, by rank; none where there is none of this run."""
        for step in sorted(self._steps.iterdir() if self._steps.exists() else (), reverse=True):
            for first in step.glob("1-of-*"):
                size = first.name.removeprefix("1-of-")
                each = [step / f"{rank}-of-{size}" for rank in range(1, int(size) + 1)]
                if all(map(self._is_own, each)):
                    return each
        return []

    def _is_own(self, directory: Path) -> bool:
        known = (directory / STATE_FILE).exists()
        return known and load_checkpoint(directory, tensors=False)[1].get("fingerprint") == self._fingerprint


class MetricsFile:
    """``directory/metrics.jsonl``, readable by the owner only, with its first ``done`` lines.

    With 0 the file of another run is moved aside. Raises ``StorageError`` if it cannot be created.
    """

    def __init__(self, directory: Path, done: int) -> None:
        self._metrics = file = directory / METRICS_FILE
        make_directory(directory)
        for draft in filter(Path.is_file, directory.rglob(".*.????????")):  # of a call that was killed
            draft.unlink(missing_ok=True)
        lines: list[str] = []
        if not done and file.exists() and file.stat().st_size:
            names = (file.with_name(f"metrics-{number:06d}.jsonl") for number in count(1))
            file.rename(next(path for path in names if not path.exists()))
        with suppress(OSError, UnicodeDecodeError):  # a lost file; training still resumes from the checkpoint
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[:done]
        self._write("w", "".join(lines))

    def log(self, record: Mapping[str, float]) -> None:
        """Append one line to the metrics."""
        self._write("a", json.dumps(record) + "\n")

    def _write(self, mode: str, text: str) -> None:
        try:
            with open(self._metrics, mode, encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                file.write(text)
        except OSError as error:
            raise StorageError(f"{self._metrics} cannot be written: {describe(error)}; free some space") from error


def make_directory(directory: Path) -> None:
    """Create a directory, readable by the owner only, unless it exists. Raises ``StorageError``."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"{directory} cannot be made ({describe(error)}): choose another directory") from error


def fingerprint(settings: str, samples: Iterable[Sample], weights: Iterable[int], step: int) -> str:
    """A digest of everything that a run's result depends on. ``weights``: a checksum of each initial tensor."""
    digest = hashlib.sha256(f"{settings}\n{step}\n".encode())
    for sample in samples:
        about = (sample.trajectory_id, sample.advantage, sample.temperature, len(sample.input_ids))
        digest.update(("\n".join(map(str, about)) + "\n").encode())
        parts = (sample.input_ids, sample.mask, sample.logprobs, sample.token_advantages, sample.token_temperatures)
        digest.update(b"".join(parts))
        if sample.count != 1:
            digest.update(f"{sample.count}\n".encode())
    digest.update(array("q", weights).tobytes())
    return digest.hexdigest()
