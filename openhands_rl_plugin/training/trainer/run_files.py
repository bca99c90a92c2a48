"""The fingerprint of a training run, and its metrics file with one line per step."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.types import Sample

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """``directory/metrics.jsonl``, readable by the owner only. Raises ``StorageError`` if it cannot be created."""

    def __init__(self, directory: Path) -> None:
        self._metrics = directory / METRICS_FILE
        make_directory(directory)

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
        digest.update(array("q", sample.input_ids).tobytes())
        digest.update(bytes(sample.mask))
        digest.update(array("d", sample.logprobs).tobytes())
        digest.update(array("d", (*sample.token_advantages, *sample.token_temperatures)).tobytes())
        if sample.count != 1:
            digest.update(f"{sample.count}\n".encode())
    digest.update(array("q", weights).tobytes())
    return digest.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
