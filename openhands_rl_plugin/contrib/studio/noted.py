"""What trainings noted of the tokens of an episode, from the ``notes`` folders of the runs that are shown."""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from pydantic import ValidationError

from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.training.trainer.note_files import (
    NOTES_FOLDER,
    Frame,
    NotedSample,
    NotedTraining,
    frames,
    note_files,
    numbers_of,
    training_of,
)

_MOST_FILES = 1000
_MOST_NOTES = 200
_KEPT = 4
_DEPTHS = ("", "*/", "*/*/")
"""Where below a run its trainings lie: itself, or a folder for each stage."""

Numbers = Mapping[str, list[float | None]]


class Noted(NamedTuple):
    """A pass of a training over a node. ``numbers`` has a value for each of its sampled tokens."""

    about: JsonObject
    numbers: Numbers


NotesOfNode = tuple[list[JsonObject], Noted | None]
"""All passes, and the one that is shown."""


class _Found(NamedTuple):
    path: Path
    run: str
    training: NotedTraining
    sample: NotedSample
    frame: Frame

    @property
    def key(self) -> str:
        return f"{self.run}/{_stem(self.path)}/{self.sample.epoch}"


@dataclass
class _Index:
    """Which frames of a file are about which episode: the checksum of its id, and where the frame begins."""

    training: NotedTraining | None = None
    end: int = 0
    episodes: array[int] = field(default_factory=lambda: array("I"))
    begins: array[int] = field(default_factory=lambda: array("Q"))


class NoteShelf:
    """Finds notes; files that grow are read on from where they ended."""

    def __init__(self, sources: StudioSources) -> None:
        self._runs = sources.runs
        self._lock = Lock()
        self._known: dict[Path, _Index] = {}
        self._read: OrderedDict[tuple[Path, int], Numbers] = OrderedDict()

    def of(self, episode: str, node: int, count: int, wanted: str | None = None) -> NotesOfNode:
        """All passes over a node of ``count`` sampled tokens, oldest training first, and the numbers of the ``wanted``
        one, by default the last. Blocks while it reads."""
        with self._lock:
            return self._of(episode, node, count, wanted)

    def _of(self, episode: str, node: int, count: int, wanted: str | None) -> NotesOfNode:
        found = [each for each in self._frames(episode) if (node, count) in each.sample.nodes][-_MOST_NOTES:]
        found.sort(key=lambda each: (each.training.at, each.sample.epoch))
        chosen = next((each for each in found if each.key == wanted), found[-1] if found else None)
        choices = [_about(each) for each in found]
        if chosen is None or (numbers := self._numbers(chosen)) is None:
            return choices, None
        first = 0
        for other, size in chosen.sample.nodes:
            if other == node:
                break
            first += size
        return choices, Noted(_about(chosen), {name: each[first : first + count] for name, each in numbers.items()})

    def _files(self) -> Iterator[tuple[str, Path]]:
        seen: set[Path] = set()
        for name, run in sorted(self._runs.items()):
            for depth in _DEPTHS:
                for folder in sorted(run.glob(f"{depth}{NOTES_FOLDER}")):
                    if folder not in seen and not folder.is_symlink():
                        seen.add(folder)
                        yield from ((name, path) for path in note_files(folder))

    def _frames(self, episode: str) -> Iterator[_Found]:
        mark = zlib.crc32(episode.encode())
        for _, (run, path) in zip(range(_MOST_FILES), self._files(), strict=False):
            with suppress(OSError), path.open("rb") as file:
                index = self._index(path, path.stat().st_size)
                if index.training is None:
                    continue
                at = -1
                while (at := _next(index.episodes, mark, at + 1)) >= 0:
                    frame = next(frames(file, index.begins[at]), None)
                    with suppress(ValidationError):
                        if frame is not None:
                            sample = NotedSample.model_validate_json(frame.header)
                            if sample.episode == episode:
                                yield _Found(path, run, index.training, sample, frame)

    def _index(self, path: Path, size: int) -> _Index:
        index = self._known.get(path)
        if index is None or size < index.end:
            index = self._known[path] = _Index()
        with path.open("rb") as file:
            if index.training is None:
                index.training = training_of(file)
            for frame in frames(file, index.end):
                if frame.begins:
                    with suppress(ValidationError):
                        sample = NotedSample.model_validate_json(frame.header)
                        index.episodes.append(zlib.crc32(sample.episode.encode()))
                        index.begins.append(frame.begins)
                index.end = frame.ends
        return index

    def _numbers(self, found: _Found) -> Numbers | None:
        key = (found.path, found.frame.begins)
        known = self._read.get(key)
        if known is None:
            with found.path.open("rb") as file:
                read = numbers_of(file, found.frame)
            if read is None:
                return None
            known = self._read[key] = read[1]
        self._read.move_to_end(key)
        if len(self._read) > _KEPT:
            self._read.popitem(last=False)
        return known


def _about(found: _Found) -> JsonObject:
    return {
        "key": found.key,
        "run": found.run,
        "stage": found.path.parent.parent.name,
        "algorithm": found.training.algorithm,
        "version": found.training.version,
        "epoch": found.sample.epoch,
        "epochs": found.training.epochs,
        "step": found.sample.step,
        "at": found.training.at,
    }


def _stem(path: Path) -> str:
    return f"{path.parent.parent.name}/{path.stem}"


def _next(values: array[int], value: int, start: int) -> int:
    try:
        return values.index(value, start)
    except ValueError:
        return -1
