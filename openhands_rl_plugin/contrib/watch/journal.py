"""The journal: one JSON line a step, on the disk before the next step begins. All state follows from reading it.

A line that a killed process left half written is cut off before the next one is appended; a step whose line is not
there did not happen, and every step can be repeated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.files import PRIVATE, locked_folder
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Frozen, JsonObject

JOURNAL = "journal.jsonl"


class WatchStep(StrEnum):
    """What a line says. ``COULD_NOT`` changes nothing: the same step is tried again."""

    FROZEN = "frozen"
    """The held-out suite is these tasks from now on."""
    JUDGED = "judged"
    REPLAYED = "replayed"
    """Tasks of users were played again, so that there are attempts to compare."""
    GATHERED = "gathered"
    """A round begins: these episodes, this algorithm, this parent."""
    TRAINED = "trained"
    MEASURED = "measured"
    """A version was played on the held-out suite."""
    PASSED = "passed"
    """The candidate passed a gate."""
    HELD = "held"
    """A gate held the candidate back: the round ends, and what was in use stays."""
    ADMITTED = "admitted"
    """The candidate is in use: the round ends."""
    ROLLED_BACK = "rolled-back"
    """An earlier version, or the base model, is in use again; a round in progress ends."""
    COULD_NOT = "could-not"


class Entry(Frozen):
    """A line. ``at``: Unix seconds. ``round``: 0 outside of one. ``adapter``: the version that it is about."""

    number: int = Field(ge=1)
    at: float
    step: WatchStep
    round: int = 0
    adapter: str = ""
    said: str
    figures: JsonObject = Field(default_factory=dict)


def folder_of(root: Path, name: str) -> Path:
    """Where the journal of an adapter's watch lies: beside its versions below ``root``."""
    return root / f"{name}.watch"


class Journal:
    """The journal in ``folder``, which several processes may append to. Methods raise ``StorageError``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / JOURNAL
        self._alone = False

    def read(self) -> tuple[Entry, ...]:
        """All whole lines, oldest first."""
        try:
            lines = self.file.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StorageError(f"{self.file} cannot be read: {describe(error)}") from error
        return tuple(self._entry(number, line) for number, line in enumerate(lines, 1))

    def append(
        self, step: WatchStep, said: str, *, round: int = 0, adapter: str = "", figures: JsonObject | None = None
    ) -> Entry:
        """Add a line, which is on the disk when this returns; when it raises, there is nothing of it."""
        if not self._alone:
            with self.alone():
                return self.append(step, said, round=round, adapter=adapter, figures=figures)
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            try:
                return self._write(descriptor, step, redact_text(said), round, adapter, figures or {})
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"{self.file} cannot be written: {describe(error)}; free some space") from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else appends until the block ends, so that what was read stays true meanwhile."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked_folder(self.folder):
                self._alone = True
                yield
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be used: {describe(error)}") from error
        finally:
            self._alone = False

    def _write(
        self, descriptor: int, step: WatchStep, said: str, round: int, adapter: str, figures: JsonObject
    ) -> Entry:
        whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        end = whole.rfind(b"\n") + 1
        number = whole.count(b"\n") + 1
        entry = Entry(
            number=number, at=time.time(), step=step, round=round, adapter=adapter, said=said, figures=figures
        )
        line = entry.model_dump_json().encode() + b"\n"
        os.ftruncate(descriptor, end)
        try:
            if os.pwrite(descriptor, line, end) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
        return entry

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            return Entry.model_validate_json(line)
        except ValidationError as error:
            raise StorageError(f"{self.file}: line {number} is damaged; move the file away to begin anew") from error
