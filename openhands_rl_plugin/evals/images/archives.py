"""Images in files: OCI layouts and archives of them, and what ``docker save`` and ``podman save`` write."""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tempfile
import threading
from pathlib import Path
from typing import IO, Protocol

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.images.layers import ImageLimits, bounded_stream
from openhands_rl_plugin.evals.images.manifests import (
    MOST_OF_JSON,
    ImageConfig,
    Platform,
    check_platform,
    choose,
    digest_of,
    is_index,
    read_config,
    read_json,
    read_manifest,
)
from openhands_rl_plugin.evals.images.tars import TarReader

_MOST_MEMBERS = 100_000
_INDEX, _OF_DOCKER = "index.json", "manifest.json"
_CHUNK = 2**20


class SourceImage(Frozen):
    """An image that a source has: its identity (the digest of its configuration), and its layers, lowest first, by the
    names that the source opens them by.
    """

    id: str
    config: ImageConfig
    layers: tuple[str, ...]


class ImageFiles(Protocol):
    """Files by relative names."""

    def __contains__(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """Its content. Raises ``BadEnvironmentError`` where there is none."""
        ...


class LayoutFolder:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def open(self, name: str) -> IO[bytes]:
        """A regular file."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BadEnvironmentError(f"{self._folder} has no {name}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BadEnvironmentError(f"{self._folder}: {name} is no file")
        return os.fdopen(descriptor, "rb")


class ImageArchive:
    """The files of an uncompressed tar archive, which are read in place."""

    def __init__(self, path: Path, named: str = "") -> None:
        self._path = path
        self._named = named or str(path)
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with path.open("rb") as file:
            for number, member in enumerate(TarReader(file, self._named, seekable=True)):
                if number > _MOST_MEMBERS:
                    raise BadEnvironmentError(f"{self._named} has more than {_MOST_MEMBERS} members: it is no image")
                name = posixpath.normpath(member.name)
                if member.isreg():
                    self._places[name] = member.offset_data, member.size
                elif member.issym():  # Docker writes a layer once, and links to it
                    self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))

    def __contains__(self, name: str) -> bool:
        return self._links.get(name, name) in self._places

    def open(self, name: str) -> IO[bytes]:
        """A member."""
        if name not in self:
            raise BadEnvironmentError(f"{self._named} has no {name[:200]!r}")
        return io.BufferedReader(FilePart(self._path, *self._places[self._links.get(name, name)]), _CHUNK)


class FilePart(io.RawIOBase):
    """``size`` bytes of a file from ``start`` on."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        wanted = memoryview(buffer)[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(wanted) or 0
        self._at += count
        return count

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._at = position + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()


class FileSource:
    """The image in a layout or an archive. ``name``: which one, where there are several. Its methods block."""

    def __init__(self, path: Path, files: ImageFiles, wanted: Platform, name: str = "") -> None:
        self._path, self._files, self._wanted, self._name = path, files, wanted, name

    def image(self) -> SourceImage:
        """The image. Raises ``ConfigError`` where there is none for the platform, and ``BadEnvironmentError``."""
        if _INDEX in self._files and "oci-layout" in self._files:
            return self._of_layout()
        if _OF_DOCKER in self._files:
            return self._of_docker()
        raise ConfigError(f"{self._path} is no image: neither {_INDEX} with oci-layout nor {_OF_DOCKER} is in it")

    def open(self, layer: str, stop: threading.Event) -> IO[bytes]:
        """A layer. Raises ``BadEnvironmentError`` and ``OSError``."""
        return self._files.open(layer)

    def _of_layout(self) -> SourceImage:
        document = read_json(self._read(_INDEX), f"{self._path}: {_INDEX}")
        for _ in range(4):  # an index of indexes
            if not is_index(document):
                break
            chosen = choose(document, self._wanted, str(self._path), self._name)
            document = read_json(self._read(_blob(chosen.digest)), f"{self._path}: {chosen.digest}", chosen.digest)
        manifest = read_manifest(document, str(self._path))
        config = self._config(_blob(manifest.config.digest), manifest.config.digest)
        return self._checked(manifest.config.digest, config, [_blob(each.digest) for each in manifest.layers])

    def _of_docker(self) -> SourceImage:
        data = self._read(_OF_DOCKER)
        images = read_json(b'{"images":' + data + b"}", f"{self._path}: {_OF_DOCKER}")["images"]
        images = [each for each in images if isinstance(each, dict)] if isinstance(images, list) else []
        tagged = [each for each in images if self._name and self._name in (each.get("RepoTags") or ())] or images
        if len(tagged) != 1:
            tags = ", ".join(str(tag) for each in images for tag in each.get("RepoTags") or ()) or "without names"
            raise ConfigError(f"{self._path} has {len(images)} images ({tags}); say which with --name")
        where, layers = str(tagged[0].get("Config")), tagged[0].get("Layers") or []
        stem = posixpath.basename(where).removesuffix(".json")
        # Docker names the file by its digest.
        wanted = f"sha256:{stem}" if len(stem) == 64 else ""
        config = self._config(where, wanted)
        return self._checked(wanted or digest_of(self._read(where)), config, list(map(str, layers)))

    def _config(self, where: str, digest: str) -> ImageConfig:
        config = read_config(self._read(where), f"{self._path}: {where}", digest)
        check_platform(config, self._wanted, str(self._path))
        return config

    def _checked(self, identity: str, config: ImageConfig, layers: list[str]) -> SourceImage:
        return checked_image(identity, config, layers, str(self._path))

    def _read(self, name: str) -> bytes:
        with self._files.open(posixpath.normpath(name)) as file:
            data = file.read(MOST_OF_JSON + 1)
        if len(data) > MOST_OF_JSON:
            raise BadEnvironmentError(f"{self._path}: {name} is too large")
        return data


def checked_image(identity: str, config: ImageConfig, layers: list[str], what: str) -> SourceImage:
    """An image whose configuration knows all of its layers. Raises ``BadEnvironmentError`` for another."""
    if len(config.diff_ids) != len(layers):
        raise BadEnvironmentError(f"{what} is damaged: {len(layers)} layers, {len(config.diff_ids)} digests of layers")
    return SourceImage(id=identity, config=config, layers=tuple(layers))


class OpenedFile:
    """The image in a folder, or in an archive, which is uncompressed into ``scratch`` first if it has to be."""

    def __init__(self, path: Path, wanted: Platform, name: str, *, scratch: Path, limits: ImageLimits) -> None:
        self._path, self._wanted, self._name = path, wanted, name
        self._scratch, self._limits = scratch, limits
        self._plain: Path | None = None

    def open(self, stop: threading.Event) -> FileSource:
        """Blocks. Raises ``ConfigError``, ``BadEnvironmentError``, ``InfrastructureError`` and ``OSError``."""
        if self._path.is_dir():
            return FileSource(self._path, LayoutFolder(self._path), self._wanted, self._name)
        return FileSource(self._path, ImageArchive(self._uncompressed(stop), str(self._path)), self._wanted, self._name)

    def close(self) -> None:
        """Remove what was uncompressed."""
        if self._plain is not None:
            self._plain.unlink(missing_ok=True)

    def _uncompressed(self, stop: threading.Event) -> Path:
        with LayoutFolder(self._path.parent).open(self._path.name) as file:
            plain = bounded_stream(file, self._limits.size, str(self._path))
            if plain is None:
                return self._path
            descriptor, name = tempfile.mkstemp(dir=self._scratch, prefix="archive-")
            self._plain = Path(name)
            with open(descriptor, "wb") as into:
                while part := plain.read(_CHUNK):
                    if stop.is_set():
                        raise InfrastructureError(f"{self._path}: unpacking was cancelled")
                    into.write(part)
        return self._plain


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/', 1)}"
