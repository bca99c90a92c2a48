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
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.core.files import PRIVATE, replacing
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.distributed.ranks import Ranks

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
"""The directory of sharded checkpoints; its name is part of the stored format."""


class RunCheckpoint:
    """The checkpoints of one call: one file of rank 0, or ``parts/STEP/RANK-of-RANKS``, a shard of each rank.

    A step in shards is valid when all of them are there, of one run. The step before it is removed only then, so that
    there is always a valid one. Every method is a collective: all ranks must call it.
    """

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks, *, sharded: bool) -> None:
        self._directory, self._fingerprint, self._ranks, self._sharded = directory, fingerprint, ranks, sharded

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint of this run that rank 0 finds, or this rank's shard of it. Raises ``TrainingError``."""
        found = self._ranks.broadcast(self._newest())
        if not found:
            return None
        one = found[0] == self._directory
        if one == self._sharded or not (one or len(found) == self._ranks.size):
            how = "without splitting the weights" if one else f"in {len(found)} processes with split weights"
            raise TrainingError(
                f"{found[0]} was saved {how}: start the run like that to resume it, or remove it to begin again"
            )
        return load_checkpoint(found[self._ranks.rank if self._sharded else 0])

    def save(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Save the state after ``done`` steps of the call. Raises ``StorageError``."""
        mine = {**counters, "fingerprint": self._fingerprint, "done": str(done)}
        if not self._sharded:
            if self._ranks.rank == 0:
                save_checkpoint(self._directory, tensors, mine)
            return
        step = self._directory / SHARDS / f"{done:08d}"
        make_directory(step)
        save_checkpoint(step / f"{self._ranks.rank + 1}-of-{self._ranks.size}", tensors, mine)
        self._ranks.assert_equal("steps done", step.name)
        if self._ranks.rank == 0:
            for other in step.parent.iterdir():
                if other != step:
                    shutil.rmtree(other, ignore_errors=True)

    def delete(self) -> None:
        """Remove the checkpoint, once the trained weights are saved."""
        if self._sharded:
            self._ranks.assert_equal("steps done", "all")
        if self._ranks.rank == 0:
            (self._directory / STATE_FILE).unlink(missing_ok=True)
            shutil.rmtree(self._directory / SHARDS, ignore_errors=True)

    def _newest(self) -> list[Path]:
        """The folder of the checkpoint, or those of its shards, by rank; none where there is none of this run."""
        shards = self._directory / SHARDS
        for step in sorted(shards.iterdir() if shards.exists() else (), reverse=True):
            for first in step.glob("1-of-*"):
                size = first.name.removeprefix("1-of-")
                each = [step / f"{rank}-of-{size}" for rank in range(1, int(size) + 1)]
                if all(map(self._is_own, each)):
                    return each
        return [self._directory] if self._is_own(self._directory) else []

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
