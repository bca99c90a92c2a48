"""OpenHands' editors, which open any path of the host, on copies of a session's files in a private folder.

What an editor writes to a copy is written to the session's files by ``Workspace``, which follows no link out of them,
or by a container's programs.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from openhands_rl_plugin.environments.workspace.files import MAX_LISTED, FileKind

_KEPT = 10  # versions of a file


class EditedFiles(Protocol):
    """A session's files. All methods raise ``OSError``."""

    def kind(self, path: str) -> FileKind | None:
        """The kind of the file; ``None`` where there is none."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file."""
        ...

    def entries(self, path: str) -> Sequence[tuple[str, FileKind]]:
        """Names in a directory with their kinds."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the file's content."""
        ...


class Place(NamedTuple):
    """The files that hold a path, its ``name`` there, and the path as the model reads it."""

    files: EditedFiles
    name: str
    shown: str


class CopyEditor[E]:
    """One session's editor, with the undo history of its files. Calls run one at a time.

    ``place`` finds an absolute path of the session, ``private`` is a folder of the host, ``make`` makes OpenHands'
    editor, given the folder of the copies.
    """

    def __init__(self, place: Callable[[str], Place], private: Path, make: Callable[[Path], E]) -> None:
        self.copies = private / "editor" / "copies"
        self._place = place
        self._history = private / "editor" / "history"
        self._make = make
        self._editor: E | None = None
        self._calls = threading.Lock()

    def forked(self, place: Callable[[str], Place], private: Path) -> Self:
        """An editor of a fork, with this one's undo history."""
        twin = type(self)(place, private, self._make)
        if self._history.exists():
            shutil.copytree(self._history, twin._history)
        return twin

    def edit[R](self, path: str, call: Callable[[E, Path], R]) -> R:
        """``call`` with the editor, and the copy of what is at an absolute ``path``; a folder's has its names only.

        Raises ``PermissionError`` for a path out of the session's files, and other ``OSError``.
        """
        with self._calls:
            files, name, shown = self._place(path)
            copied = self._copy(files, name, shown)
            before = copied.read_bytes() if copied.is_file() else None
            result = call(self._opened(), copied)
            after = copied.read_bytes() if copied.is_file() else None
            if after is not None and after != before:
                files.write(name, after)
            return result

    def _copy(self, files: EditedFiles, name: str, shown: str) -> Path:
        shutil.rmtree(self.copies, ignore_errors=True)
        if ".." in Path(shown).parts:
            # Behind a link it leads elsewhere than in the folder of the copies, and out of that one.
            raise PermissionError(f"{shown}: write the path without ..")
        copied = Path(f"{self.copies}{shown}")
        kind = files.kind(name)
        if kind is not None or files.kind(str(Path(name).parent)) == "directory":
            copied.parent.mkdir(parents=True)
        if kind == "directory":
            _copy_names(files, name, copied, 2, MAX_LISTED)
        elif kind is not None:
            copied.write_bytes(files.read(name))
        return copied

    def _opened(self) -> E:
        if self._editor is None:
            self._editor = self._make(self.copies)
            holder: Any = self._editor
            made = holder._history_manager
            # OpenHands makes a folder for the history and never removes it.
            shutil.rmtree(made.cache.directory, ignore_errors=True)
            kept = holder._history_manager = type(made)(max_history_per_file=_KEPT, history_dir=self._history)
            # With names inside the session as keys, the history can be copied to another one.
            kept._get_metadata_key = lambda path: f"{path.relative_to(self.copies)}.metadata"
            kept._get_history_key = lambda path, counter: f"{path.relative_to(self.copies)}.{counter}"
        return self._editor


def _copy_names(files: EditedFiles, name: str, into: Path, levels: int, room: int) -> int:
    """Empty files and folders with the names, at most ``room``; returns how many are left of that."""
    into.mkdir()
    for entry, kind in files.entries(name) if levels else ():
        if room <= 0:
            break
        room -= 1
        if kind == "directory":
            # What is below a folder that nobody may read is not shown.
            with suppress(OSError):
                room = _copy_names(files, f"{name}/{entry}", into / entry, levels - 1, room)
        else:
            (into / entry).touch()
    return room
