"""The folder of one run: finished instances are lines of ``output.jsonl``, which survives a killed process.

Each line is written at once and flushed to disk; a partial last line is cut off. So a resumed run loses no instance
and repeats none.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.files import PRIVATE, is_contained, write_file
from openhands_rl_plugin.core.types import JsonObject

OUTPUT = "output.jsonl"
METADATA = "metadata.json"
PREDICTIONS = "predictions.jsonl"
COMPLETIONS = "llm_completions"
_LOCK = ".lock"


class RunFiles:
    """The files of one run, for one process at a time. Raises ``ConfigError`` when another one writes to them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be written to: {error.strerror}") from error
        self._lock = lock_folder(directory, "another process evaluates into this folder; wait for it")
        _cut_half_line(directory / OUTPUT)
        self.done = finished_instances(directory)
        self._output: IO[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def write_metadata(self, metadata: JsonObject) -> None:
        """Write ``metadata.json`` unless it is there: that of the first start stays."""
        if not (self.directory / METADATA).exists():
            write_file(self.directory / METADATA, json.dumps(metadata), PRIVATE)

    def append(self, row: JsonObject) -> None:
        """Add a finished instance, from any thread. Raises ``StorageError``, also for a duplicate."""
        identity = row["instance_id"]
        assert isinstance(identity, str)
        line = json.dumps(row).encode() + b"\n"
        with self._one_at_a_time:
            if self._closed or identity in self.done:
                raise StorageError(f"{self.directory}: {identity} is finished already, or the run is closed")
            try:
                if self._output is None:
                    self._output = _private(self.directory / OUTPUT)
                self._output.write(line)
                self._output.flush()
                os.fsync(self._output.fileno())
            except OSError as error:
                raise StorageError(f"{self.directory / OUTPUT}: cannot be written: {error.strerror}") from error
            self.done.add(identity)

    def write_completions(self, instance_id: str, files: Iterator[tuple[str, JsonObject]]) -> None:
        """Replace the instance's folder of ``llm_completions``."""
        folder = self.directory / COMPLETIONS / instance_id
        if not is_contained(instance_id):
            raise StorageError(f"{self.directory}: the id {instance_id!r:.100} cannot name a folder")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, mode=0o700)
            for name, content in files:
                with _private(folder / name) as file:
                    file.write(json.dumps(content).encode())
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error

    def forget(self, unwanted: Callable[[JsonObject], bool]) -> int:
        """Remove lines of ``output.jsonl``, so that their instances run again. Returns their number."""
        kept = [row for row in read_rows(self.directory / OUTPUT) if not unwanted(row)]
        gone = len(self.done) - len(kept)
        if gone:
            write_file(self.directory / OUTPUT, "".join(f"{json.dumps(row)}\n" for row in kept), PRIVATE)
            self.done = {str(row["instance_id"]) for row in kept}
        return gone

    def close(self) -> None:
        """Close the files and release the lock."""
        with self._one_at_a_time:
            self._closed = True
            if self._output is not None:
                self._output.close()
        os.close(self._lock)


def lock_folder(directory: Path, taken: str) -> int:
    """Lock an existing folder until the returned descriptor is closed or the process ends.

    Raises ``ConfigError``, with the text ``taken`` when another process holds the lock.
    """
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        why = taken if isinstance(error, BlockingIOError) else f"cannot be locked: {error.strerror}"
        raise ConfigError(f"{directory}: {why}") from error
    return lock


def read_rows(file: Path) -> Iterator[JsonObject]:
    """The complete lines of ``output.jsonl``; none without the file. Raises ``ConfigError``."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n") and line.strip():
                    yield _row(file, number, line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def finished_instances(directory: Path) -> set[str]:
    """The ids of the instances that a run has finished. Raises ``ConfigError``."""
    return {str(row["instance_id"]) for row in read_rows(directory / OUTPUT)}


def _cut_half_line(output: Path) -> None:
    if output.exists():
        with output.open("r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def _row(file: Path, number: int, line: bytes) -> JsonObject:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{file}: line {number} is not JSON; remove it to run its instance again") from error
    if not isinstance(row, dict) or not isinstance(row.get("instance_id"), str):
        raise ConfigError(f"{file}: line {number} has no instance_id; it is not a line of OpenHands' evaluation")
    return row


def _private(file: Path) -> IO[bytes]:
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
