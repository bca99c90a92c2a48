"""OpenHands' editors, which open any path of the host, on copies of a session's files in a private folder.

What an editor writes to a copy is written to the session's files in their sandbox.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.environments.workspace.shell import Shell

_KEPT = 10  # versions of a file


class CopyEditor[E]:
    """One session's editor, with the undo history of its files. Calls run one at a time.

    ``files`` gives the session's files for one use, ``private`` is a folder of the host, ``make`` makes OpenHands'
    editor, given the folder of the copies.
    """

    def __init__(self, files: Callable[[], Shell], private: Path, make: Callable[[Path], E]) -> None:
        self.copies = private / "editor" / "copies"
        self._files = files
        self._history = private / "editor" / "history"
        self._make = make
        self._editor: E | None = None
        self._calls = threading.Lock()

    def forked(self, files: Callable[[], Shell], private: Path) -> Self:
        """An editor of a fork, with this one's undo history."""
        twin = type(self)(files, private, self._make)
        if self._history.exists():
            shutil.copytree(self._history, twin._history)
        return twin

    def on_copy[R](self, path: str, call: Callable[[E, Path], R]) -> R:
        """``call`` with the editor, and the copy of what is at an absolute ``path``; a folder's has its names only.

        Raises ``OSError``.
        """
        with self._calls:
            name, files = _plain(path), self._files()
            copied = self._copy(files, name)
            before = copied.read_bytes() if copied.is_file() else None
            result = call(self._opened(), copied)
            after = copied.read_bytes() if copied.is_file() else None
            if after is not None and after != before:
                files.write(name, after)
            return result

    def _copy(self, files: Shell, name: str) -> Path:
        shutil.rmtree(self.copies, ignore_errors=True)
        copied, kind = Path(f"{self.copies}{name}"), files.kind(name)
        if kind is not None or files.kind(str(Path(name).parent)) == "directory":
            copied.parent.mkdir(parents=True, exist_ok=True)
        if kind == "directory":
            copied.mkdir()
            for entry, kind in files.entries(name, levels=2):
                copy = copied / entry
                copy.mkdir() if kind == "directory" else copy.touch()
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


def _plain(path: str) -> str:
    """An absolute path without empty parts. Raises ``PermissionError``."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        # Behind a link it leads elsewhere than in the folder of the copies, and out of that one.
        raise PermissionError(f"{path}: write the path without ..")
    if "\0" in path or whole_text(path) != path:
        raise PermissionError("a path cannot hold a null character, or half a character")
    return f"/{'/'.join(parts)}"


# Characters of two texts, of which a diff takes about a second at worst.
_MOST_COMPARED = 200_000


def is_long(before: str | None, after: str | None) -> bool:
    """Whether two texts are so long that their lines are not compared one with another."""
    return len(before or "") + len(after or "") > _MOST_COMPARED
