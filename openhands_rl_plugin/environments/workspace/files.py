"""Access of the host to a session's files, never outside of the workspace.

A command of the session may change the tree while a path is resolved, so a check of the path before opening it would
not be safe. Paths are resolved one component at a time from open directories, and symbolic links explicitly: one that
leaves the workspace is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.environments.workspace.sandbox import INSIDE

MAX_FILE_BYTES = 10 * 1024 * 1024
MAX_LISTED = 20_000
_MAX_LINKS = 40
# Each folder on the way is an open file of this process, whose other sessions need theirs.
_MAX_DEPTH = 256
_PATH_MAX = 4096

FileKind = Literal["file", "directory", "other"]


class Workspace:
    """The tree at ``root`` on the host, which the session calls ``/workspace``.

    Every path may be absolute by either name, or relative to the workspace. All methods raise ``PermissionError`` for
    a path that leaves it, and other ``OSError`` as usual, with the path as it was given.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def kind(self, path: str) -> FileKind | None:
        """The kind of the file at ``path``; ``None`` where there is none."""
        try:
            with self._parent(path) as (directory, name):
                mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"

    def read(self, path: str, most: int = MAX_FILE_BYTES) -> bytes:
        """The whole file, of at most ``most`` bytes."""
        with self._parent(path) as (directory, name):
            # A pipe without a writer would block; it is refused after it was opened.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            with os.fdopen(descriptor, "rb") as file:
                _check_regular(os.fstat(descriptor), path)
                data = file.read(most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", path)
        return data

    def write(self, path: str, data: bytes) -> None:
        """Replace the file's content in place, or make the file and the folders above it."""
        with self._parent(path, make=True) as (directory, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o666, dir_fd=directory)
            with os.fdopen(descriptor, "wb") as file:
                _check_regular(os.fstat(descriptor), path)
                file.truncate()
                file.write(data)

    def entries(self, path: str) -> list[tuple[str, FileKind]]:
        """Names in a directory with their kinds, sorted; a symbolic link counts as ``other``."""
        with self._parent(path) as (directory, name):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=directory)
        try:
            with os.scandir(descriptor) as found:
                return sorted((entry.name, _kind_of(entry)) for entry, _ in zip(found, range(MAX_LISTED), strict=False))
        finally:
            os.close(descriptor)

    def files(self, path: str) -> Iterator[str]:
        """Regular files below a directory, relative to it; symbolic links are not followed."""
        pending = deque([""])
        while pending:
            below = pending.popleft()
            for name, kind in self.entries(os.path.join(path, below)):
                if kind == "directory":
                    pending.append(os.path.join(below, name))
                elif kind == "file":
                    yield os.path.join(below, name)

    def name_inside(self, path: str) -> str:
        """The path as the session writes it, below ``/workspace``, with links and ``..`` as they are."""
        return "/".join((INSIDE, *self._components(path)))

    def _components(self, path: str) -> list[str]:
        if "\0" in path:
            raise PermissionError(errno.EPERM, "a path cannot hold a null character", path)
        try:
            size = len(os.fsencode(path))
        except UnicodeEncodeError as half:
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), whole_text(path)) from half
        if size > _PATH_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        for base in (INSIDE, str(self.root)):
            if path == base or path.startswith(base + "/"):
                path = path[len(base) :]
                break
        else:
            if path.startswith("/"):
                raise _outside(path)
        return [part for part in path.split("/") if part not in ("", ".")]

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open directory that really holds ``path``, and its name there: no link, no ``..``."""
        todo, links = deque(self._components(path)), 0
        above = [_open_directory(str(self.root), None)]
        try:
            while todo:
                name = todo.popleft()
                if name == "..":
                    if len(above) == 1:
                        raise _outside(path)
                    os.close(above.pop())
                elif (target := _link_target(name, above[-1])) is not None:
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if target.startswith("/"):
                        while len(above) > 1:
                            os.close(above.pop())
                        todo.extendleft(reversed(self._components(target)))
                    else:
                        todo.extendleft(part for part in reversed(target.split("/")) if part not in ("", "."))
                elif todo:
                    if len(above) > _MAX_DEPTH:
                        raise OSError(errno.ENAMETOOLONG, f"below more than {_MAX_DEPTH} folders", path)
                    above.append(_step_into(name, above[-1], path, make))
                else:
                    yield above[-1], name
                    return
            yield above[-1], "."
        finally:
            for descriptor in above:
                os.close(descriptor)


def _step_into(name: str, directory: int, path: str, make: bool) -> int:
    try:
        return _open_directory(name, directory)
    except FileNotFoundError as missing:
        if not make:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from missing
        os.mkdir(name, dir_fd=directory)
        return _open_directory(name, directory)


def _open_directory(name: str, directory: int | None) -> int:
    return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)


def _outside(path: str) -> PermissionError:
    return PermissionError(f"{path} is outside of {INSIDE}: only files in {INSIDE} can be read or written")


def _link_target(name: str, directory: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _kind_of(entry: os.DirEntry[str]) -> FileKind:
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"
