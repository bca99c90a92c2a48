"""Unpacks the layers of an image, which are archives of strangers, and puts them on top of each other.

Nothing is written outside of the given folder, and no link is followed: the folders above a member are folders that
this code made itself. Devices, sockets and pipes are left out, and so are bits and attributes that give rights (setuid,
setgid, ``security.*``, ``trusted.*``) or that an overlay would read (``user.overlay.*``). All files belong to the user.

Whiteouts (``.wh.NAME``, ``.wh..wh..opq``) are those of the OCI image specification, "layer".
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
import stat
import tarfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.images.squashfs import MAGIC as SQUASHFS
from openhands_rl_plugin.evals.images.squashfs import SquashReader
from openhands_rl_plugin.evals.images.tars import Readable, TarReader

_GIBIBYTE = 1024**3
_REMOVED, _OPAQUE, _OTHER = ".wh.", ".wh..wh..opq", ".wh..wh."
_XATTR = "SCHILY.xattr."
_NO_RIGHTS = 0o1777
_LATEST = 2**33
_DEEPEST = 200
_OF_A_NAME = (errno.EILSEQ, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOENT)
TREE, FACTS = "tree", "layer.json"


class ImageLimits(Frozen):
    """Limits of one image: bytes that it is unpacked to, files in it, and bytes of one of them."""

    size: int = Field(default=64 * _GIBIBYTE, ge=1)
    files: int = Field(default=4_000_000, ge=1)
    file: int = Field(default=32 * _GIBIBYTE, ge=1)


class LayerFacts(Frozen):
    """What unpacking a layer found: bytes and files, members that were left out, and what it removes of the layers
    below it: paths, and folders whose content it replaces.
    """

    size: int
    files: int
    left_out: int = 0
    removed: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()


class _Bounded:
    """Counts and hashes what is read, up to ``most`` bytes."""

    def __init__(self, stream: Readable, most: int, what: str) -> None:
        self._stream = stream
        self._left = most
        self._what = what
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._stream.read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error, *_zstd_errors()) as error:
            raise BadEnvironmentError(f"{self._what} is damaged: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._what)
        self.hash.update(data)
        return data


def unpack_layer(
    stream: IO[bytes], into: Path, diff_id: str, limits: ImageLimits, *, what: str, stop: threading.Event
) -> LayerFacts:
    """Unpack a layer to ``into/tree``, and what is known of it to ``into/layer.json``. Blocks.

    ``stream``: an archive (plain, gzip or zstd), or a squashfs; it can go back.

    Raises ``ConfigError`` where a limit is reached, ``BadEnvironmentError`` for a damaged or hostile archive or one
    whose content does not have the digest ``diff_id``, ``InfrastructureError`` when ``stop`` is set, and ``OSError``.
    """
    (into / TREE).mkdir(mode=0o755)
    unpacking = Unpacking(into / TREE, limits, what, stop)
    found = _of_squashfs if stream.read(len(SQUASHFS)) == SQUASHFS else _of_archive
    stream.seek(0)
    if found(stream, unpacking, limits, what) != diff_id:
        raise BadEnvironmentError(f"{what} is damaged: its content does not have the digest {diff_id}")
    facts = unpacking.facts()
    # Names may be bytes that are no text.
    (into / FACTS).write_text(json.dumps(facts.model_dump()))
    return facts


def _of_archive(stream: IO[bytes], unpacking: Unpacking, limits: ImageLimits, what: str) -> str:
    """Its digest."""
    plain = _Bounded(decompressed(stream, what), limits.size, what)
    reader = TarReader(plain, what)
    for member in reader:
        unpacking.add(member, reader)
    unpacking.finish()
    while plain.read(2**20):
        pass
    return f"sha256:{plain.hash.hexdigest()}"


def _of_squashfs(stream: IO[bytes], unpacking: Unpacking, limits: ImageLimits, what: str) -> str:
    """Its digest."""
    reader = SquashReader(stream, what)
    for member in reader:
        unpacking.add(member, reader)
    unpacking.finish()
    stream.seek(0)
    whole = _Bounded(stream, limits.size, what)
    while whole.read(2**20):
        pass
    return f"sha256:{whole.hash.hexdigest()}"


def read_facts(layer: Path) -> LayerFacts:
    """The facts of an unpacked layer."""
    return LayerFacts.model_validate(json.loads((layer / FACTS).read_text()))


def decompressed(stream: IO[bytes], what: str) -> Readable:
    """The content of a plain, gzip or zstd stream, which begins now. Raises ``BadEnvironmentError`` for another."""
    head = stream.read(6)
    stream.seek(-len(head), os.SEEK_CUR)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream, mode="rb")
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        from backports import zstd

        return zstd.ZstdFile(stream, "rb")
    if head.startswith((b"BZh", b"\xfd7zXZ")):
        raise BadEnvironmentError(f"{what} is compressed by bzip2 or xz, which images are not; use gzip or zstd")
    return stream


def bounded_stream(stream: IO[bytes], most: int, what: str) -> Readable | None:
    """The content of a compressed stream, of at most ``most`` bytes; ``None`` for one that is not compressed.

    Reading raises ``ConfigError`` beyond that, and ``BadEnvironmentError`` for a damaged one.
    """
    plain = decompressed(stream, what)
    return None if plain is stream else _Bounded(plain, most, what)


class Contents(Protocol):
    """What gives the content of the member that came last."""

    def content(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """In parts. Raises ``BadEnvironmentError``."""
        ...


class Unpacking:
    """One layer that is being unpacked."""

    def __init__(self, tree: Path, limits: ImageLimits, what: str, stop: threading.Event) -> None:
        self._tree, self._limits, self._what, self._stop = str(tree), limits, what, stop
        self._folders: dict[str, tuple[int, float] | None] = {"": None}
        self._size = self._files = self._left_out = 0
        self._removed: list[str] = []
        self._opaque: list[str] = []

    def add(self, member: tarfile.TarInfo, reader: Contents) -> None:
        """Unpack the next member."""
        if self._stop.is_set():
            raise InfrastructureError(f"{self._what}: unpacking was cancelled")
        path = self._clean(member.name)
        self._files += 1
        if self._files > self._limits.files:
            raise too_large(self._what)
        try:
            self._put(path, member, reader)
        except OSError as error:
            if error.errno in _OF_A_NAME:
                raise self._hostile(member.name, f"has a name that is none here: {error.strerror}") from error
            raise

    def _put(self, path: str, member: tarfile.TarInfo, reader: Contents) -> None:
        folder, _, name = path.rpartition("/")
        if name.startswith(_REMOVED):
            self._whiteout(folder, name)
        elif member.isdir():
            self._folder(path)
            self._folders[path] = (member.mode & _NO_RIGHTS | stat.S_IRWXU, member.mtime)
        elif not path:
            raise self._hostile(member.name, "is no folder")
        elif member.issparse():
            raise self._hostile(member.name, "is a sparse file, which layers do not have")
        elif member.isreg() or member.issym() or member.islnk():
            self._folder(folder)
            self._clear(path)
            if member.issym():
                os.symlink(member.linkname, self._at(path))
                _set_time(self._at(path), member.mtime)
            elif member.islnk():
                self._link(path, self._clean(member.linkname))
            else:
                self._file(path, member, reader)
        elif member.isdev():
            self._left_out += 1
        else:
            raise self._hostile(member.name, "is of an unknown kind")

    def finish(self) -> None:
        """Give the folders their modes and times."""
        for path, known in self._folders.items():
            mode, mtime = known or (0o755, 0.0)
            os.chmod(self._at(path), mode)
            _set_time(self._at(path), mtime)

    def facts(self) -> LayerFacts:
        """What was unpacked."""
        return LayerFacts(
            size=self._size,
            files=self._files,
            left_out=self._left_out,
            removed=tuple(self._removed),
            opaque=tuple(self._opaque),
        )

    def _clean(self, name: str) -> str:
        """A member's path below the root. Archives may write ``/a``, ``./a`` and ``a/``."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name:
            raise self._hostile(name, "leads out of the image")
        return "/".join(parts)

    def _at(self, path: str) -> str:
        return f"{self._tree}/{path}" if path else self._tree

    def _folder(self, path: str) -> None:
        """Make a folder and those above it; where there is something else, the archive contradicts itself."""
        if path in self._folders:
            return
        if path.count("/") > _DEEPEST:
            raise self._hostile(path, "is too deep")
        self._folder(path.rpartition("/")[0])
        try:
            os.mkdir(self._at(path), 0o755)
        except FileExistsError as error:
            raise self._hostile(path, "is a folder, and before that something else") from error
        self._folders[path] = None

    def _clear(self, path: str) -> None:
        if path in self._folders:
            raise self._hostile(path, "is a folder, and then something else")
        with suppress(FileNotFoundError):
            os.unlink(self._at(path))

    def _whiteout(self, folder: str, name: str) -> None:
        if name == _OPAQUE:
            self._opaque.append(folder)
        elif not name.startswith(_OTHER):
            removed = name.removeprefix(_REMOVED)
            if removed in ("", ".", ".."):
                raise self._hostile(name, "removes what is no name")
            self._removed.append(f"{folder}/{removed}" if folder else removed)

    def _link(self, path: str, target: str) -> None:
        """A hard link, to a file of this layer that was unpacked before."""
        folder = target.rpartition("/")[0]
        if folder not in self._folders or not os.path.lexists(self._at(target)) or target in self._folders:
            raise self._hostile(path, f"is a hard link to {target[:100]!r}, which is no file of this layer")
        os.link(self._at(target), self._at(path), follow_symlinks=False)

    def _file(self, path: str, member: tarfile.TarInfo, reader: Contents) -> None:
        if member.size > self._limits.file:
            raise too_large(f"{self._what}: {path}")
        at = self._at(path)
        with open(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            for part in reader.content(member):
                self._size += len(part)
                if self._size > self._limits.size:
                    raise too_large(self._what)
                if self._stop.is_set():
                    raise InfrastructureError(f"{self._what}: unpacking was cancelled")
                file.write(part)
            os.fchmod(file.fileno(), member.mode & _NO_RIGHTS & ~stat.S_ISVTX | stat.S_IRUSR)
            for name, value in member.pax_headers.items():
                self._attribute(file.fileno(), name, value)
        _set_time(at, member.mtime)

    @staticmethod
    def _attribute(descriptor: int, name: str, value: str) -> None:
        name = name.removeprefix(_XATTR) if name.startswith(_XATTR) else ""
        if name.startswith("user.") and not name.startswith("user.overlay."):
            with suppress(OSError, ValueError):  # the file system may have none
                os.setxattr(descriptor, name, value.encode("utf-8", "surrogateescape"))

    def _hostile(self, name: str, why: str) -> BadEnvironmentError:
        return BadEnvironmentError(f"{self._what} cannot be unpacked: {name[:200]!r} {why}")


def assemble(layers: Iterable[Path], root: Path, *, stop: threading.Event) -> None:
    """Make ``root`` of unpacked layers, lowest first. Files are hard links into the layers, so nobody may write them.

    Blocks. Raises ``InfrastructureError`` when ``stop`` is set, and ``OSError``.
    """
    root.mkdir(mode=0o755)
    for layer in layers:
        facts = read_facts(layer)
        for path in facts.opaque:
            if (folder := _real(root, path)) is not None:
                for entry in list(os.scandir(folder)):
                    _remove(entry.path)
        for path in facts.removed:
            parent, _, name = path.rpartition("/")
            if (folder := _real(root, parent)) is not None and os.path.lexists(f"{folder}/{name}"):
                _remove(f"{folder}/{name}")
        for source, target in _merged(str(layer / TREE), str(root)):
            if stop.is_set():
                raise InfrastructureError("making the image's files was cancelled")
            _put(source, target)


def _merged(tree: str, root: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    """What of a layer has to be put where. Folders are there before what is in them, and get their times after it."""
    pending, folders = [(tree, root)], [(tree, root)]
    while pending:
        source, target = pending.pop()
        for entry in os.scandir(source):
            place = f"{target}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if not os.path.isdir(place) or os.path.islink(place):
                    _remove(place)
                    os.mkdir(place, 0o755)
                pending.append((entry.path, place))
                folders.append((entry.path, place))
            else:
                yield entry, place
    for source, target in reversed(folders):
        found = os.lstat(source)
        os.chmod(target, stat.S_IMODE(found.st_mode))
        os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))


def _put(source: os.DirEntry[str], target: str) -> None:
    _remove(target)
    try:
        os.link(source.path, target, follow_symlinks=False)
    except OSError:
        # Too many links of one file, or a file system without them.
        shutil.copy2(source.path, target, follow_symlinks=False)


def _real(root: Path, path: str) -> str | None:
    """The place of ``path`` when it and all above it are folders, not links to some."""
    place = str(root)
    for part in path.split("/") if path else ():
        place = f"{place}/{part}"
        if os.path.islink(place) or not os.path.isdir(place):
            return None
    return place


def _remove(place: str) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    else:
        with suppress(FileNotFoundError):
            os.unlink(place)


def _set_time(place: str, seconds: float) -> None:
    within = int(min(max(seconds, 0), _LATEST) * 1_000_000_000)
    os.utime(place, ns=(within, within), follow_symlinks=False)


def too_large(what: str) -> ConfigError:
    """The error of what goes beyond a limit."""
    return ConfigError(f"{what} is larger than an image may be; --max-image-size allows more")


def _zstd_errors() -> tuple[type[Exception], ...]:
    from backports import zstd

    return (zstd.ZstdError,)
