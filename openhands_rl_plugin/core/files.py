"""Files that are replaced in one step: readers find the old content or the new one, also after a crash."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe

_GITS = {".git", "git~1"}
PRIVATE = 0o600
"""Mode of a file that only its owner may read."""


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty file next to ``path``; it durably replaces ``path`` if the block ends without an error.

    ``mode`` is reduced by the process's umask. Raises ``OSError``; nothing is left behind when it or the
    block fails.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
        yield draft
        sync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def draft_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in ``parent`` (made if missing, mode 0700): fill it, then rename it to its final name.

    It is removed when the block ends unless it was renamed. Raises ``OSError``.
    """
    parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def temporary_folder(kind: str) -> Path:
    """A new folder (mode 0700) for what is kept no longer than this process runs: its end removes it.

    Raises ``OSError``.
    """
    place = _of_process(os.getpid(), tempfile.gettempdir())
    place.mkdir(0o700, exist_ok=True)  # the system may have swept it
    return Path(tempfile.mkdtemp(prefix=f"openhands-rl-{kind}-", dir=place))


@functools.cache
def _of_process(pid: int, place: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="openhands-rl-of-", dir=place)).resolve()
    atexit.register(lambda: pid == os.getpid() and remove_tree(made))
    return made


def remove_tree(directory: Path) -> None:
    """Remove a folder that a session wrote to: unreadable directories, and those deeper than ``shutil`` can go. Files
    that cannot be removed are left."""

    def failed(*command: str) -> int:
        words = [*command, "--", str(directory)]
        return subprocess.run(words, check=False, stdin=subprocess.DEVNULL, capture_output=True).returncode

    if failed("rm", "-rf"):
        failed("chmod", "-R", "u+rwX")
        failed("rm", "-rf")


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A ``temporary_folder`` that programs in a sandbox may write to, removed at the end whatever they left in it."""
    folder = temporary_folder(kind)
    try:
        yield folder
    finally:
        remove_tree(folder)


@contextmanager
def locked_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """One holder at a time over all processes, until the block or the process ends. Raises ``OSError``, also for a
    folder that somebody else holds and is not waited for."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes, mode: int = 0o666, *, parents: bool = False) -> None:
    """Replace a file, text as UTF-8, as ``replacing`` does; with ``parents`` its folder is made where it is missing.

    Raises ``StorageError``.
    """
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode) as draft:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {describe(error)}") from error


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a crash of the machine. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Hexadecimal digest of a file's content. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_contained(name: str) -> bool:
    """Whether the name of a file that somebody else gave stays below a folder and out of git's own, by the rules of
    every file system: relative, without ``..`` and control characters, and no spelling of ``.git`` in it.
    """
    return not any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name) and not _parts(name) & {"", *_GITS}


def is_gits_own(name: str) -> bool:
    """Whether a file's name has a spelling of ``.git`` in it."""
    return bool(_parts(name) & _GITS)


def _parts(name: str) -> set[str]:
    """The parts as the most lenient file system takes them: without case, signs that are not shown, trailing dots."""
    shown = "".join(sign for sign in name.replace("\\", "/") if unicodedata.category(sign) not in ("Cc", "Cf"))
    parts = unicodedata.normalize("NFKC", shown).casefold().split("/")
    return {part.partition(":")[0].rstrip(". ") for part in parts}
