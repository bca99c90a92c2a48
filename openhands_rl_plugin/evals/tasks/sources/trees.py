"""The files of a package as a value: read from an archive or a commit, changed, written to a directory."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from openhands_rl_plugin.core.errors import ConfigError

MOST_FILES, MOST_BYTES = 20_000, 256 * 1024**2
PLAIN, EXECUTABLE, LINK = "100644", "100755", "120000"


@dataclass(frozen=True)
class TreeFile:
    """A file with its mode as git writes it; the data of a link is its target."""

    mode: str
    data: bytes


@dataclass(frozen=True)
class SourceTree:
    """Files by their path from the root, with ``/`` between the parts."""

    files: Mapping[str, TreeFile]

    def text(self, path: str) -> str | None:
        """The text of a file; ``None`` when there is none, or it is no UTF-8."""
        found = self.files.get(path)
        if found is None or found.mode == LINK:
            return None
        try:
            return found.data.decode()
        except UnicodeDecodeError:
            return None

    def changed(self, changes: Mapping[str, str | None]) -> SourceTree:
        """This tree with other texts at some paths; ``None`` removes the file."""
        files = dict(self.files)
        for path, text in changes.items():
            if text is None:
                files.pop(path, None)
            else:
                mode = files[path].mode if path in files else PLAIN
                files[path] = TreeFile(mode, text.encode())
        return SourceTree(files)

    def write(self, directory: Path) -> None:
        """Write all files below ``directory``, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        made: set[Path] = set()
        for path, file in self.files.items():
            target = directory / path
            if target.parent not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            if file.mode == LINK:
                target.symlink_to(os.fsdecode(file.data))
                continue
            target.write_bytes(file.data)
            if file.mode == EXECUTABLE:
                target.chmod(0o755)


def read_archive(path: Path) -> SourceTree:
    """The files of a ``.tar.gz`` or ``.zip`` below its one top folder. Raises ``ConfigError`` for what is none."""
    try:
        members = dict(_zip_members(path) if zipfile.is_zipfile(path) else _tar_members(path))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise ConfigError(f"{path} is no source archive that can be read: {error}") from error
    files = {name.partition("/")[2]: file for name, file in members.items() if name.find("/") > 0}
    return bounded(SourceTree({name: files[name] for name in sorted(files) if _is_inside(name)}), str(path))


def bounded(tree: SourceTree, what: str) -> SourceTree:
    """``tree``. Raises ``ConfigError`` when it is empty, or larger than a task's repository may be."""
    if not tree.files:
        raise ConfigError(f"{what} holds no files")
    if len(tree.files) > MOST_FILES or sum(len(file.data) for file in tree.files.values()) > MOST_BYTES:
        raise ConfigError(
            f"{what} has more than {MOST_FILES} files or {MOST_BYTES // 1024**2} MB; take a smaller package"
        )
    return tree


def _tar_members(path: Path) -> Iterator[tuple[str, TreeFile]]:
    with tarfile.open(path) as archive:
        total = 0
        for member in archive:
            total += member.size
            if total > MOST_BYTES:
                raise ConfigError(f"{path} unpacks to more than {MOST_BYTES // 1024**2} MB; take a smaller package")
            if member.isfile() and (stream := archive.extractfile(member)) is not None:
                yield member.name, TreeFile(EXECUTABLE if member.mode & 0o100 else PLAIN, stream.read())


def _zip_members(path: Path) -> Iterator[tuple[str, TreeFile]]:
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
            raise ConfigError(f"{path} unpacks to more than {MOST_BYTES // 1024**2} MB; take a smaller package")
        for info in archive.infolist():
            if not info.is_dir():
                yield info.filename, TreeFile(PLAIN, archive.read(info))


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and ".git" not in parts and "\n" not in name
