"""What lies in a folder: stores, loops and trainings, evaluations, adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from openhands_rl_plugin.apps.loop.parts import STATE
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.runs.run_files import OUTPUT
from openhands_rl_plugin.training.trainer.run_files import METRICS_FILE
from openhands_rl_plugin.trajectories.sqlite.database import FILE_NAME

_DEEPEST = 4
_MOST_FOLDERS = 5000
_SKIPPED = frozenset({"checkouts", "logs", "__pycache__", "node_modules"})
_VERSION = re.compile(r".+-v\d{6,}")
_TRAINING = ("trainer", "training")
"""Folders of a loop in which its metrics lie."""


@dataclass
class Found:
    """Folders of each kind."""

    stores: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    evaluations: list[Path] = field(default_factory=list)
    adapters: list[Path] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return bool(self.stores or self.runs or self.evaluations or self.adapters)


def discover(folder: Path) -> Found:
    """``look`` into a folder. An empty one is that of a loop which has not begun. Raises ``ConfigError`` when there is
    no folder, and when nothing of what is in it can be shown."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give that of a store, a run, an evaluation or adapters")
    found = look(folder)
    if not found.any and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: there is nothing to show in it; give the folder of a store, a run, an evaluation or adapters"
        )
    return found


def look(folder: Path) -> Found:
    """What lies in a folder and, a few levels deep, in those below."""
    found = Found()
    for directory, files, folders in _walk(folder):
        if FILE_NAME in files:
            found.stores.append(directory)
        if STATE in files or (METRICS_FILE in files and not set(_TRAINING) & {*directory.relative_to(folder).parts}):
            found.runs.append(directory)
        if OUTPUT in files:
            found.evaluations.append(directory)
        if any(_VERSION.fullmatch(name) for name in folders) and directory.name not in _TRAINING:
            found.adapters.append(directory)
    return found


def _walk(folder: Path) -> Iterator[tuple[Path, set[str], list[str]]]:
    """Folder, its files and its folders, from above; links are not followed."""
    waiting, seen = [(folder, 0)], 0
    while waiting and seen < _MOST_FOLDERS:
        directory, depth = waiting.pop(0)
        seen += 1
        try:
            with os.scandir(directory) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue
        below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield directory, {entry.name for entry in entries if entry.is_file()}, below
        if depth < _DEEPEST:
            shown = [name for name in below if not name.startswith(".") and name not in _SKIPPED]
            waiting += [(directory / name, depth + 1) for name in shown if not _VERSION.fullmatch(name)]
