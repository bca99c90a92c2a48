"""What one training run leaves on the disk while it goes on: its metrics, a line a step, and where it stands."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from openhands_rl_plugin.errors import StorageError, describe
from openhands_rl_plugin.training.checkpoint import STATE_FILE, load_checkpoint, save_checkpoint
from openhands_rl_plugin.types import Sample

METRICS_FILE = "metrics.jsonl"


class RunFiles:
    """``directory/metrics.jsonl`` and, until the run is finished, its newest checkpoint. Both are for the owner only.

    ``fingerprint`` names the run: data, settings and starting point. A checkpoint of another run is not continued.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._metrics = directory / METRICS_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"{directory} cannot be made ({describe(error)}): choose another directory") from error

    def resume(self) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The newest checkpoint of this run, if there is one; the metrics are cut back to it."""
        found = load_checkpoint(self._directory) if (self._directory / STATE_FILE).exists() else None
        if found is None or found[1].get("fingerprint") != self._fingerprint:
            self._keep_lines(0)
            return None
        self._keep_lines(int(found[1]["done"]))
        return found

    def checkpoint(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Note that ``done`` steps are done. Raises ``StorageError``."""
        save_checkpoint(self._directory, tensors, {**counters, "fingerprint": self._fingerprint, "done": str(done)})

    def log(self, record: Mapping[str, float]) -> None:
        """Append one line to the metrics."""
        try:
            with open(self._metrics, "a", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise StorageError(f"{self._metrics} cannot be written: {describe(error)}; free some space") from error

    def finish(self) -> None:
        """Forget the checkpoint: the run is done."""
        (self._directory / STATE_FILE).unlink(missing_ok=True)

    def _keep_lines(self, count: int) -> None:
        try:
            lines = self._metrics.read_text(encoding="utf-8").splitlines(keepends=True) if count else []
        except (OSError, UnicodeDecodeError):
            lines = []  # lost with the machine; the run itself is in the checkpoint
        with open(self._metrics, "w", encoding="utf-8", opener=_private) as file:
            file.writelines(lines[:count])


def fingerprint(settings: str, samples: Iterable[Sample], weights: Mapping[str, Tensor], step: int) -> str:
    """Names a run by everything that its result depends on."""
    digest = hashlib.sha256(f"{settings}\n{step}\n".encode())
    for sample in samples:
        digest.update(f"{sample.trajectory_id}\n{sample.advantage}\n{len(sample.input_ids)}\n".encode())
        digest.update(array("q", sample.input_ids).tobytes())
        digest.update(bytes(sample.mask))
        digest.update(array("d", sample.logprobs).tobytes())
        digest.update(array("d", sample.token_advantages).tobytes())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
