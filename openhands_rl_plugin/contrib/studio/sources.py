"""What a studio shows, by name: stores, runs, evaluations and adapters, how they are found, and their episodes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from openhands_rl_plugin.apps.loop.run import STATE
from openhands_rl_plugin.apps.stores import is_folder, storage_at
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.core.errors import ConfigError, RLError, unknown_name
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.evals.runs.run_files import OUTPUT
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE
from openhands_rl_plugin.models.adapters.store import MANIFEST, METRICS_FILE
from openhands_rl_plugin.trajectories.drift import TOKENIZER, load_tokenizer
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_PAUSE = 2.0
"""Seconds between two looks for what has come."""
Found = dict[str, list[Path]]
"""Folders by kind: ``stores``, ``runs``, ``evaluations`` and ``adapters``."""


@dataclass
class StudioSources:
    """Name -> store, or folder. The first store is meant where a request names none. ``folders``: each with what has
    been found in it so far, which is looked into again and again.
    """

    stores: dict[str, TrajectoryStorage] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    evaluations: dict[str, Path] = field(default_factory=dict)
    adapters: dict[str, Path] = field(default_factory=dict)
    folders: dict[Path, Found] = field(default_factory=dict)

    def add(self, folder: Path, found: Found) -> None:
        """Show what was found in a folder, by names that are short and differ."""
        known = [(kind, path) for each in self.folders.values() for kind, paths in each.items() for path in paths]
        so_far = self.folders.setdefault(folder, {kind: [] for kind in found})
        for kind, path in (
            (kind, path) for kind, paths in found.items() for path in paths if (kind, path) not in known
        ):
            short = sayable((Path(folder.name) / path.relative_to(folder)).as_posix()).strip("/") or "root"
            shown: dict[str, Any] = getattr(self, kind)
            shown[free_name(short, shown)] = storage_at(str(path)) if kind == "stores" else path
            so_far[kind].append(path)

    def waiting(self) -> list[str]:
        """The folders in which nothing has been found so far."""
        return [folder.name for folder, found in self.folders.items() if not any(found.values())]

    def store(self, request: Request) -> TrajectoryStorage:
        """The store of ``?store=``, or the first one. Raises ``HTTPException`` 404 and ``ConfigError``."""
        name = request.query_params.get("store")
        if not self.stores:
            if names := ", ".join(self.waiting()):
                raise HTTPException(404, f"{names}: nothing is stored there yet; it is shown as soon as it is")
            raise HTTPException(404, "no store is open; start the studio with the folder of one")
        if not name:
            return next(iter(self.stores.values()))
        if name not in self.stores:
            raise ConfigError(unknown_name("store", name[:80], self.stores))
        return self.stores[name]

    async def holding(self, request: Request, identity: str) -> TrajectoryStorage:
        """The store that has an episode, by default any of them. Raises ``HTTPException`` 404."""
        named = request.query_params.get("store")
        for storage in [self.store(request)] if named else [*self.stores.values()]:
            if await storage.count(TrajectoryFilter(ids=(identity,), finished=None)):
                return storage
        raise HTTPException(404, f"no store has the episode {identity[:80]!r}")

    @staticmethod
    def folder(request: Request, folders: Mapping[str, Path], what: str) -> Path:
        """The folder that the path names. Only names are looked up, so that none leads elsewhere. Raises
        ``HTTPException`` 404."""
        name = request.path_params["id"]
        if name not in folders:
            raise HTTPException(404, unknown_name(what, name[:80], folders))
        return folders[name]

    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of stores, runs, evaluations and adapters."""
        return tuple(tuple(each) for each in (self.stores, self.runs, self.evaluations, self.adapters))

    async def watch(self) -> None:
        """Look again and again for what has come, for at most a twentieth of the time."""
        while self.folders:
            started = time.monotonic()
            for folder in [*self.folders]:
                self.add(folder, await asyncio.to_thread(look, folder))
            await asyncio.sleep(max(_PAUSE, 20 * (time.monotonic() - started)))

    async def close(self) -> None:
        """Close every store."""
        for storage in self.stores.values():
            await storage.close()


_DEEPEST = 4
_MOST_FOLDERS = 5000
_SKIPPED = frozenset({"checkouts", "logs", "__pycache__", "node_modules"})
_VERSION = re.compile(r".+-v\d{6,}")
_TRAINING = ("trainer", "training")
"""Folders of a loop in which its metrics lie."""


def sources_at(places: Sequence[str]) -> StudioSources:
    """The sources in these places, now and later. An empty folder counts as a loop that has not begun.

    Raises ``ConfigError`` if a folder does not exist, or if nothing in it can be shown.
    """
    sources = StudioSources()
    for where in places:
        if not is_folder(where):
            sources.stores[sayable(where)] = storage_at(where)
            continue
        folder = Path(where).expanduser().resolve()
        found = look(folder)
        if not folder.is_dir() or (not any(found.values()) and any(folder.iterdir())):
            raise ConfigError(f"{folder}: there is no store, run, evaluation or folder of adapters")
        sources.add(folder, found)
    return sources


def look(folder: Path) -> Found:
    """Find the sources in a folder and, a few levels deep, in its subfolders."""
    found: Found = {"stores": [], "runs": [], "evaluations": [], "adapters": []}
    for directory, files, folders in _walk(folder):
        training = set(_TRAINING) & {*directory.relative_to(folder).parts}
        shown = {
            "stores": FILE_NAME in files,
            "runs": STATE in files or (METRICS_FILE in files and not training),
            "evaluations": OUTPUT in files,
            "adapters": any(_VERSION.fullmatch(name) for name in folders) and directory.name not in _TRAINING,
        }
        for kind in (kind for kind, is_one in shown.items() if is_one):
            found[kind].append(directory)
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


class Opened(NamedTuple):
    """An episode, its scores and labels, and the store that has it; ``revision`` is empty where the store has none."""

    storage: TrajectoryStorage
    revision: str
    trajectory: Trajectory
    scores: tuple[Score, ...]
    labels: tuple[Label, ...]


def free_name(name: str, known: Collection[str]) -> str:
    """``name``, or with a number behind it a name that is not known."""
    names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in known)


class EpisodeShelf:
    """Opens episodes of all stores."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._last: Opened | None = None

    async def open(self, request: Request, identity: str | None = None) -> Opened:
        """The episode of the path, or another one. Raises ``HTTPException`` 404 and ``StorageError``."""
        asked = request.path_params["id"] if identity is None else identity
        storage = await self._sources.holding(request, asked)
        revision, last = await storage.revision(), self._last
        if last is None or (last.storage, last.revision, last.trajectory.id) != (storage, revision, asked):
            last = self._last = await read_episode(storage, asked, revision)
        return last


async def read_episode(storage: TrajectoryStorage, identity: str, revision: str = "") -> Opened:
    """An episode of a store. Raises ``HTTPException`` 404 and ``StorageError``."""
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=(identity,), finished=None)):
        return Opened(storage, revision, trajectory, scores, await storage.labels([identity]))
    raise HTTPException(404, f"no store has the episode {identity[:80]!r}")


_BEFORE = 8
"""Tokens that are decoded before a page, so that its first piece has the space that it has inside of a text."""
_LARGEST = 64 * 1024**2
_MOST_VERSIONS = 200


class TokenText:
    """Pieces of text for token ids: by the tokenizer of a folder or file, else by that of an episode's base model,
    where this machine has it.

    Raises ``ConfigError`` for a given one that cannot be read.
    """

    def __init__(self, folder: str = "", adapters: Mapping[str, Path] | None = None) -> None:
        self._given = load_tokenizer(Path(folder).expanduser()) if folder else None
        self._adapters = adapters or {}
        self._known: dict[str, Tokenizer] = {}

    def problem(self, model: str) -> str | None:
        """Why there is no text, for the page; ``None`` where there is."""
        if self._tokenizer(model) is not None:
            return None
        return f"the tokenizer of {model[:200]} is not on this machine; start the studio with --tokenizer DIR"

    def pieces(self, model: str, ids: Sequence[int], first: int, end: int) -> list[str | None]:
        """The text of each of ``ids[first:end]``; a character of several tokens stands at its last one. ``None`` where
        the tokenizer of ``model`` does not know the id, or there is none."""
        tokenizer = self._tokenizer(model)
        if tokenizer is None:
            return [None] * (end - first)
        from tokenizers.decoders import DecodeStream

        size, found = tokenizer.get_vocab_size(with_added_tokens=True), list[str | None]()
        stream = DecodeStream(skip_special_tokens=False)
        for at in range(max(0, first - _BEFORE), end):
            known = 0 <= ids[at] < size
            piece = (stream.step(tokenizer, ids[at]) or "") if known else None
            if at >= first:
                found.append(piece)
        return found

    def _tokenizer(self, model: str) -> Tokenizer | None:
        if self._given is not None:
            return self._given
        for place in () if model in self._known else _places(model, self._adapters):
            with suppress(RLError, OSError):
                if place.is_file() and place.stat().st_size <= _LARGEST:
                    self._known[model] = load_tokenizer(place)
                    break
        return self._known.get(model)


def _places(model: str, adapters: Mapping[str, Path]) -> Iterator[Path]:
    """Files that may have the tokenizer of a recorded base model: its folder, and the one that a version of an adapter
    of it was trained in."""
    if Path(model).is_absolute():
        yield Path(model) / TOKENIZER
    for root in adapters.values():
        for manifest in sorted(root.glob(f"*/{MANIFEST}"), reverse=True)[:_MOST_VERSIONS]:
            with suppress(OSError, ValueError, AttributeError):
                if json.loads(manifest.read_bytes()).get("base_model") == model:
                    trained = json.loads((manifest.parent / CONFIG_FILE).read_bytes())["base_model_name_or_path"]
                    yield Path(trained) / TOKENIZER
