"""A copy of what programs look for in ``/etc``, made once per process: one mount in place of thirty, each of which
takes up to a millisecond whenever a sandbox starts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.files import temporary_folder

_MOST_BYTES = 2**20


def settings_copy(names: Sequence[str]) -> str:
    """The folder with copies of these files and folders of ``/etc``, as far as everybody may read them."""
    folder = _made(tuple(names), os.getpid())
    if not os.path.isdir(folder):  # folders of temporary files are swept
        _made.cache_clear()
        folder = _made(tuple(names), os.getpid())
    return folder


@functools.cache
def _made(names: tuple[str, ...], pid: int) -> str:
    folder = temporary_folder("etc")
    for name in names:
        with contextlib.suppress(OSError, shutil.Error):
            _copy(Path("/etc", name), folder / name)
    # A mount shows it to who is mapped to another user, too.
    folder.chmod(0o755)
    return str(folder)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and os.path.realpath(source).startswith("/usr/"):
        target.symlink_to(os.path.realpath(source))
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=_closed)
    elif source.is_file() and not _is_closed(source):
        shutil.copyfile(source, target)


def _closed(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if _is_closed(Path(folder, name))]


def _is_closed(path: Path) -> bool:
    """Whether others may not read it, or it is no setting at all."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return False
    kinds = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES)
    return not (kinds and found.st_mode & stat.S_IROTH)
