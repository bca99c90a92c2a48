"""Where a training run stands, kept until what it has made is saved: by rank 0, or by every rank its part.

``fingerprint`` names the run: data, settings and starting point. What another run has left is not continued.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from torch import Tensor

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.distributed.ranks import Checkpoint, Ranks
from openhands_rl_plugin.training.trainer.checkpoint import STATE_FILE, load_checkpoint, load_counters, save_checkpoint
from openhands_rl_plugin.training.trainer.run_files import make_directory

PARTS = "parts"


class KeptState(Protocol):
    """Every method is to be called by all ranks."""

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint of this run, if there is one. Raises ``TrainingError``."""
        ...

    def keep(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """Note that ``done`` steps are done. Raises ``StorageError``."""
        ...

    def forget(self) -> None:
        """What the run has made is saved."""
        ...


class Unsaved:
    """The checkpoints whose results are saved nowhere else yet."""

    def __init__(self) -> None:
        self._states: list[KeptState] = []

    def add(self, state: KeptState) -> None:
        """One more."""
        self._states.append(state)

    def forget(self) -> None:
        """All results are saved now; to be called by all ranks."""
        while self._states:
            self._states.pop().forget()


class KeptWhole:
    """All ranks have the same state; rank 0 keeps it, in one file."""

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._ranks = ranks

    def resume(self) -> Checkpoint | None:
        """What rank 0 finds."""
        found = _found(self._directory, self._fingerprint, self._ranks)
        if found.step is not None:
            raise _kept_otherwise(self._directory / PARTS, f"in {found.size} processes with split weights")
        mine = self._ranks.rank == 0 and found.whole
        return self._ranks.tell(load_checkpoint(self._directory) if mine else None)

    def keep(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """At any moment there is the old one or the new one."""
        if self._ranks.rank == 0:
            mine = {**counters, "fingerprint": self._fingerprint, "done": str(done)}
            save_checkpoint(self._directory, tensors, mine)

    def forget(self) -> None:
        """Remove the file."""
        if self._ranks.rank == 0:
            (self._directory / STATE_FILE).unlink(missing_ok=True)


class KeptInParts:
    """Every rank keeps its own part: ``parts/STEP/RANK-of-RANKS``. A step counts when all parts of one run are there.

    The step before it is removed only then, so that there is always one to go on from.
    """

    def __init__(self, directory: Path, fingerprint: str, ranks: Ranks) -> None:
        self._directory = directory
        self._parts = directory / PARTS
        self._fingerprint = fingerprint
        self._ranks = ranks

    def resume(self) -> Checkpoint | None:
        """This rank's part of the newest step that rank 0 sees whole."""
        found = _found(self._directory, self._fingerprint, self._ranks)
        if found.whole:
            raise _kept_otherwise(self._directory / STATE_FILE, "by one process alone, or without splitting")
        if found.step is None:
            return None
        if found.size != self._ranks.size:
            raise _kept_otherwise(self._parts, f"in {found.size} processes, not {self._ranks.size}")
        return load_checkpoint(self._own(found.step))

    def keep(self, tensors: dict[str, Tensor], counters: dict[str, str], done: int) -> None:
        """This rank's part; when all have theirs, what was there before is removed."""
        step = f"{done:08d}"
        make_directory(self._parts / step)
        mine = {**counters, "fingerprint": self._fingerprint, "done": str(done)}
        save_checkpoint(self._own(step), tensors, mine)
        self._ranks.agree("steps done", step)
        if self._ranks.rank == 0:
            for other in _steps(self._parts):
                if other.name != step:
                    shutil.rmtree(other, ignore_errors=True)

    def forget(self) -> None:
        """Remove them all."""
        self._ranks.agree("steps done", "all")
        if self._ranks.rank == 0:
            shutil.rmtree(self._parts, ignore_errors=True)

    def _own(self, step: str) -> Path:
        return self._parts / step / f"{self._ranks.rank + 1}-of-{self._ranks.size}"


class _Found(Frozen):
    """What of a run is there: all in one file, or a step in parts of ``size`` ranks."""

    whole: bool
    step: str | None = None
    size: int = 0


def _found(directory: Path, fingerprint: str, ranks: Ranks) -> _Found:
    """What rank 0 sees."""
    seen = _newest(directory / PARTS, fingerprint)
    seen = seen.model_copy(update={"whole": _is_of(directory, fingerprint)})
    return _Found.model_validate_json(ranks.say(seen.model_dump_json()))


def _kept_otherwise(path: Path, how: str) -> TrainingError:
    return TrainingError(f"{path} is of this run {how}: start it like that to go on, or remove it to begin again")


def _is_of(directory: Path, fingerprint: str) -> bool:
    return (directory / STATE_FILE).exists() and load_counters(directory).get("fingerprint") == fingerprint


def _steps(parts: Path) -> list[Path]:
    """The newest first."""
    return sorted(parts.iterdir() if parts.exists() else (), reverse=True)


def _newest(parts: Path, fingerprint: str) -> _Found:
    """The newest step of which all parts are there."""
    for step in _steps(parts):
        for first in step.glob("1-of-*"):
            size = first.name.removeprefix("1-of-")
            each = [step / f"{rank}-of-{size}" for rank in range(1, int(size) + 1)]
            if all(_is_of(part, fingerprint) for part in each):
                return _Found(whole=False, step=step.name, size=int(size))
    return _Found(whole=False)
