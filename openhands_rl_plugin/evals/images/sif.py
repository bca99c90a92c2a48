"""Images in the Singularity Image Format, as ``apptainer build`` and ``apptainer pull`` write it.

A ``.sif`` has a header, a table of descriptors, and what they describe. The image's files are the squashfs in the
primary partition; the environment, the folder and the user of a container image are in the object ``oci-config.json``.
Source: "SIF image format" (github.com/apptainer/sif, ``pkg/sif``, version 01).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import threading
from pathlib import Path
from typing import IO, NamedTuple

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.evals.images.archives import FilePart, SourceImage, checked_image
from openhands_rl_plugin.evals.images.manifests import (
    MOST_OF_JSON,
    Platform,
    check_platform,
    digest_of,
    read_config,
    read_json,
)
from openhands_rl_plugin.evals.images.squashfs import MAGIC as SQUASHFS

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii3s")
_MAGIC, _VERSION = b"SIF_MAGIC\0", b"01\0"
_IS_PARTITION, _IS_JSON, _IS_INDEX = 0x4004, 0x4006, 0x400A
_PRIMARY, _OVERLAY = 2, 4
_SQUASHFS = 1
_OTHERS = {
    2: "an ext3 file system",
    3: "an archive",
    4: "raw data",
    5: "an encrypted squashfs",
    6: "an encrypted squashfs",
}
_ARCHITECTURES = {b"01": "386", b"02": "amd64", b"03": "arm", b"04": "arm64", b"06": "ppc64le", b"11": "s390x"}
_MOST_OBJECTS = 4096
_CONFIG = "oci-config.json"
_CHUNK = 2**20


def is_sif(path: Path) -> bool:
    """Whether a file begins as such an image does."""
    with path.open("rb") as file:
        return file.read(_HEADER.size)[32 : 32 + len(_MAGIC)] == _MAGIC


class _Object(NamedTuple):
    """What a descriptor says."""

    kind: int
    used: bool
    id: int
    group: int
    linked: int
    offset: int
    size: int
    padded: int
    created: int
    modified: int
    uid: int
    gid: int
    name: bytes
    extra: bytes

    @property
    def partition(self) -> tuple[int, int, bytes]:
        """Its file system, its role and its architecture."""
        system, role, architecture = _PARTITION.unpack_from(self.extra)
        return system, role, architecture.rstrip(b"\0")


class SifSource:
    """The image in a ``.sif``."""

    def __init__(self, path: Path, image: SourceImage, offset: int, size: int) -> None:
        self._path, self._image, self._place = path, image, (offset, size)

    def image(self) -> SourceImage:
        """The image, which is known by the digest of its partition and its settings."""
        return self._image

    def open(self, layer: str, stop: threading.Event) -> IO[bytes]:
        """The squashfs. Raises ``OSError``."""
        return io.BufferedReader(FilePart(self._path, *self._place), _CHUNK)


class SifFile:
    """A ``.sif`` that is looked into."""

    def __init__(self, path: Path, wanted: Platform) -> None:
        self._path, self._wanted = path, wanted

    def open(self, stop: threading.Event) -> SifSource:
        """Its image. Blocks: all of it is read.

        Raises ``ConfigError`` for one that does not run here, ``BadEnvironmentError`` for a damaged one,
        ``InfrastructureError`` when ``stop`` is set, ``OSError``.
        """
        what = str(self._path)
        with self._path.open("rb") as file:
            objects = self._objects(file)
            partition = self._primary(objects)
            settings = self._settings(file, objects)
        document = {
            "os": "linux",
            "architecture": _ARCHITECTURES.get(partition.partition[2], "unknown"),
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [self._digest(partition, stop)]},
        }
        data = json.dumps(document, sort_keys=True).encode()
        config = read_config(data, what)
        check_platform(config, self._wanted, what)
        image = checked_image(digest_of(data), config, [self._path.name], what)
        return SifSource(self._path, image, partition.offset, partition.size)

    def _objects(self, file: IO[bytes]) -> list[_Object]:
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise self._damaged("it is cut")
        _, magic, version, _, _, _, _, _, total, offset, size, _, _ = _HEADER.unpack(head)
        if magic != _MAGIC or version != _VERSION:
            raise self._damaged("it is not of version 01")
        if not 0 < total <= _MOST_OBJECTS or size < total * _DESCRIPTOR.size or not 0 < offset <= length - size:
            raise self._damaged("its table of descriptors is not in the file")
        file.seek(offset)
        table = file.read(total * _DESCRIPTOR.size)
        found = [each for fields in _DESCRIPTOR.iter_unpack(table) if (each := _Object(*fields)).used]
        for each in found:
            if each.offset < 0 or each.size < 0 or each.offset + each.size > length:
                raise self._damaged("a descriptor leads out of the file")
        return found

    def _primary(self, objects: list[_Object]) -> _Object:
        if any(each.kind == _IS_INDEX for each in objects):
            raise ConfigError(
                f"{self._path} is an OCI-SIF, which is not read; `singularity pull --no-oci` makes another"
            )
        partitions = [each for each in objects if each.kind == _IS_PARTITION]
        if any(each.partition[1] == _OVERLAY for each in partitions):
            raise ConfigError(
                f"{self._path} has a writable overlay, which is not read; `apptainer build` makes one without it"
            )
        primary = [each for each in partitions if each.partition[1] == _PRIMARY]
        if len(primary) != 1:
            raise self._damaged(f"it has {len(primary)} primary partitions")
        system = primary[0].partition[0]
        if system != _SQUASHFS:
            what = _OTHERS.get(system, f"file system number {system}")
            raise ConfigError(f"{self._path} holds {what}; only squashfs is read")
        return primary[0]

    def _settings(self, file: IO[bytes], objects: list[_Object]) -> object:
        """``Env``, ``WorkingDir``, ``User``... Images that were not made from a container's have none."""
        for each in objects:
            if each.kind == _IS_JSON and each.name.rstrip(b"\0") == _CONFIG.encode():
                if each.size > MOST_OF_JSON:
                    raise self._damaged(f"{_CONFIG} is too large")
                file.seek(each.offset)
                return read_json(file.read(each.size), f"{self._path}: {_CONFIG}")
        return {}

    def _digest(self, partition: _Object, stop: threading.Event) -> str:
        found = hashlib.sha256()
        with FilePart(self._path, partition.offset, partition.size) as file:
            head = file.read(len(SQUASHFS))
            if head != SQUASHFS:
                raise self._damaged("its partition is no squashfs")
            found.update(head)
            while part := file.read(_CHUNK):
                if stop.is_set():
                    raise InfrastructureError(f"{self._path}: unpacking was cancelled")
                found.update(part)
        return f"sha256:{found.hexdigest()}"

    def _damaged(self, why: str) -> BadEnvironmentError:
        return BadEnvironmentError(f"{self._path} is no image that can be read: {why}")
