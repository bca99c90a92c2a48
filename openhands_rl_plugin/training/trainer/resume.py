"""Checkpoints of a running call of the trainer: one file of rank 0, or one shard of each rank.

``fingerprint`` identifies the run: data, settings and starting point. A checkpoint of another run is never resumed.

The files are safetensors. ``torch.distributed.checkpoint`` is not used: its ``.metadata`` file is a pickle, and it
replaces the files of a checkpoint one by one, so that a killed process may leave neither the old state nor the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.core.files import PRIVATE, replacing
from openhands_rl_plugin.core.types import Frozen, Sample
from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.distributed.ranks import Checkpoint, Ranks

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
"""The directory of sharded checkpoints; its name is part of the stored format."""


class RunCheckpoint(Protocol):
    """The checkpoints of one call. Every method is a collective: all ranks must call it."""

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint of this run, if there is one. Raises ``TrainingError``."""
        ...

    def save(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Save the state after ``done`` steps of the call. Raises ``StorageError``."""
        ...

    def delete(self) -> None:
        """Remove the checkpoint, once the trained weights are saved."""
        ...


class PendingCheckpoint:
    """The checkpoints of finished calls whose trained weights are not saved yet."""

    def __init__(self) -> None:
        self._pending: list[RunCheckpoint] = []

    def add(self, checkpoint: RunCheckpoint) -> None:
        """Add the checkpoint of one more call."""
        self._pending.append(checkpoint)

    def delete(self) -> None:
        """Delete them all, because the trained weights are saved now. A collective."""
        while self._pending:
            self._pending.pop().delete()


class FullCheckpoint:
    """One file, written by rank 0: all ranks have the same state."""

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._ranks = ranks

    def resume(self) -> Checkpoint | None:
        """The checkpoint that rank 0 finds, broadcast to all ranks."""
        found = _found(self._directory, self._fingerprint, self._ranks)
        if found.step is not None:
            raise _other_layout(self._directory / SHARDS, f"in {found.size} processes with split weights")
        mine = self._ranks.rank == 0 and found.full
        return self._ranks.broadcast_object(load_checkpoint(self._directory) if mine else None)

    def save(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Replace the file atomically."""
        if self._ranks.rank == 0:
            mine = {**counters, "fingerprint": self._fingerprint, "done": str(done)}
            save_checkpoint(self._directory, tensors, mine)

    def delete(self) -> None:
        """Remove the file."""
        if self._ranks.rank == 0:
            (self._directory / STATE_FILE).unlink(missing_ok=True)


class ShardedCheckpoint:
    """One shard a rank: ``parts/STEP/RANK-of-RANKS``. A step is valid when all its shards are there, of one run.

    The step before it is removed only then, so that there is always a valid one.
    """

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks) -> None:
        self._directory = directory
        self._shards = directory / SHARDS
        self._fingerprint = fingerprint
        self._ranks = ranks

    def resume(self) -> Checkpoint | None:
        """This rank's shard of the newest step that rank 0 finds complete."""
        found = _found(self._directory, self._fingerprint, self._ranks)
        if found.full:
            raise _other_layout(self._directory / STATE_FILE, "by one process alone, or without splitting")
        if found.step is None:
            return None
        if found.size != self._ranks.size:
            raise _other_layout(self._shards, f"in {found.size} processes, not {self._ranks.size}")
        return load_checkpoint(self._own(found.step))

    def save(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Write this rank's shard; when all ranks have written theirs, remove the step before."""
        step = f"{done:08d}"
        make_directory(self._shards / step)
        mine = {**counters, "fingerprint": self._fingerprint, "done": str(done)}
        save_checkpoint(self._own(step), tensors, mine)
        self._ranks.assert_equal("steps done", step)
        if self._ranks.rank == 0:
            for other in _steps(self._shards):
                if other.name != step:
                    shutil.rmtree(other, ignore_errors=True)

    def delete(self) -> None:
        """Remove all shards."""
        self._ranks.assert_equal("steps done", "all")
        if self._ranks.rank == 0:
            shutil.rmtree(self._shards, ignore_errors=True)

    def _own(self, step: str) -> Path:
        return self._shards / step / f"{self._ranks.rank + 1}-of-{self._ranks.size}"


class _Found(Frozen):
    """The checkpoints of a run on disk: one full file, or a step in shards of ``size`` ranks."""

    full: bool
    step: str | None = None
    size: int = 0


def _found(directory: Path, fingerprint: str, ranks: Ranks) -> _Found:
    """What rank 0 finds."""
    found = _newest(directory / SHARDS, fingerprint)
    found = found.model_copy(update={"full": _is_of(directory, fingerprint)})
    return _Found.model_validate_json(ranks.broadcast_text(found.model_dump_json()))


def _other_layout(path: Path, how: str) -> TrainingError:
    return TrainingError(f"{path} was saved {how}: start the run like that to resume it, or remove it to begin again")


def _is_of(directory: Path, fingerprint: str) -> bool:
    known = (directory / STATE_FILE).exists()
    return known and load_checkpoint(directory, tensors=False)[1].get("fingerprint") == fingerprint


def _steps(shards: Path) -> list[Path]:
    """The newest first."""
    return sorted(shards.iterdir() if shards.exists() else (), reverse=True)


def _newest(shards: Path, fingerprint: str) -> _Found:
    """The newest step of which all shards are there."""
    for step in _steps(shards):
        for first in step.glob("1-of-*"):
            size = first.name.removeprefix("1-of-")
            each = [step / f"{rank}-of-{size}" for rank in range(1, int(size) + 1)]
            if all(_is_of(shard, fingerprint) for shard in each):
                return _Found(full=False, step=step.name, size=int(size))
    return _Found(full=False)


class MetricsFile:
    """``directory/metrics.jsonl``, readable by the owner only. Raises ``StorageError`` if it cannot be created."""

    def __init__(self, directory: Path) -> None:
        self._metrics = directory / METRICS_FILE
        make_directory(directory)
        for draft in filter(Path.is_file, directory.rglob(".*.????????")):  # of a call that was killed
            draft.unlink(missing_ok=True)

    def log(self, record: Mapping[str, float]) -> None:
        """Append one line to the metrics."""
        try:
            with open(self._metrics, "a", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise StorageError(f"{self._metrics} cannot be written: {describe(error)}; free some space") from error

    def keep_lines(self, done: int) -> None:
        """Truncate the file to the first ``done`` lines; with 0, move the file of another run aside."""
        if not done:
            self._set_aside()
        try:
            lines = self._metrics.read_text(encoding="utf-8").splitlines(keepends=True) if done else []
        except (OSError, UnicodeDecodeError):
            lines = []  # the file is lost; training still resumes from the checkpoint
        with open(self._metrics, "w", encoding="utf-8", opener=_private) as file:
            file.writelines(lines[:done])

    def _set_aside(self) -> None:
        if not self._metrics.exists() or not self._metrics.stat().st_size:
            return
        names = (self._metrics.with_name(f"metrics-{number:06d}.jsonl") for number in count(1))
        self._metrics.rename(next(path for path in names if not path.exists()))


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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
