"""Files of a container of another program, as ``workspace.files.Workspace`` has those of a folder."""

from __future__ import annotations

import base64
import binascii
import errno
import os

from openhands_rl_plugin.environments.container import programs
from openhands_rl_plugin.environments.container.shell import ContainerShell, SessionLostError
from openhands_rl_plugin.environments.workspace.files import MAX_FILE_BYTES, MAX_LISTED, FileKind

_KINDS: dict[str, FileKind] = {"d": "directory", "f": "file", "o": "other"}
_NAMES = MAX_LISTED * 100


class ContainerFiles:
    """Reading and writing with the rights of the container's user. Paths are absolute.

    What is at a path is asked once, so that an object is for one use of it. All methods raise ``OSError`` with the
    reason of the container, and ``InfrastructureError``.
    """

    def __init__(self, shell: ContainerShell) -> None:
        self._shell = shell
        self._known: dict[str, tuple[str, bytes]] = {}
        self._folders: set[str] = set()

    def kind(self, path: str) -> FileKind | None:
        """The kind of the file at ``path``, links followed; ``None`` where there is none."""
        if path in self._folders:
            return "directory"
        kind = self._look(path)[0]
        return kind if kind in ("file", "directory", "other") else None

    def read(self, path: str) -> bytes:
        """The whole file, of at most 10 MiB."""
        kind, content = self._look(path)
        if kind != "file":
            raise OSError(errno.EINVAL, "not a regular file", path)
        return content

    def entries(self, path: str) -> list[tuple[str, FileKind]]:
        """Names in a directory with their kinds; a symbolic link counts as ``other``."""
        path = f"/{path.strip('/')}"
        root = next((each for each in self._known if path == each or path.startswith(f"{each.rstrip('/')}/")), path)
        within = path[len(root.rstrip("/")) + 1 :]
        found: list[tuple[str, FileKind]] = []
        for entry in self._look(root)[1].split(b"\0")[:-1]:
            kind, name = _KINDS[entry[:1].decode()], os.fsdecode(entry[1:])
            folder, _, last = name.rpartition("/")
            if folder == within:
                found.append((last, kind))
        return found

    def write(self, path: str, data: bytes) -> None:
        """Replace the file's content in place, or make the file and the folders above it."""
        try:
            written = self._shell.put(data, "uploaded")
        except SessionLostError as lost:
            raise OSError(errno.EIO, str(lost), path) from lost
        code, lines = self._shell.ask(f"{written} && {programs.place_at(self._shell.place.folder, path)}")
        if code:
            raise _refused(lines, path)

    def _look(self, path: str) -> tuple[str, bytes]:
        if path not in self._known:
            code, lines = self._shell.ask(programs.look(path, most=MAX_FILE_BYTES, names=_NAMES))
            if code:
                raise _refused(lines, path)
            try:
                kind, content = lines
                found = content.encode() if kind == "missing" else base64.b64decode(content, validate=True)
                _check(kind, found)
            except (ValueError, binascii.Error) as error:
                raise OSError(errno.EIO, "the container's answer about it is none of the session's", path) from error
            self._known[path] = kind, found
            if found == b"parent" and kind == "missing":
                self._folders.add(path.rpartition("/")[0] or "/")
        return self._known[path]


def _check(kind: str, found: bytes) -> None:
    """Raise ``ValueError`` for what the session's programs never tell: those of the container may be the agent's."""
    if len(found) > (_NAMES if kind == "directory" else MAX_FILE_BYTES):
        raise ValueError("too long")
    if kind == "directory" and {entry[:1] for entry in found.split(b"\0")[:-1]} - {each.encode() for each in _KINDS}:
        raise ValueError("a file of no kind")


def _refused(lines: list[str], path: str) -> OSError:
    return OSError(errno.EIO, lines[-1].rpartition(": ")[2] if lines else "refused", path)
