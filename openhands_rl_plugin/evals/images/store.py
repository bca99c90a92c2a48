"""The cache of unpacked images: a layer is unpacked once, an image's files are links into its layers.

Below its folder: ``layers/DIGEST`` (of the uncompressed layer), ``roots/ID`` (of the image's configuration, with
``root`` and ``image.json``) and ``names``, by which an image is found. All of them appear in one step. Who pulls or
uses an image holds a shared lock, who removes one an exclusive lock, so that nothing is removed in use.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.images.archives import SourceImage
from openhands_rl_plugin.evals.images.layers import ImageLimits, assemble, read_facts, too_large, unpack_layer
from openhands_rl_plugin.evals.images.manifests import ImageConfig
from openhands_rl_plugin.evals.swe.backends.caching import Cache, remove

ROOT = "root"
_IMAGE = "image.json"
_MAKING = ".making-"


class StoredImage(Frozen):
    """An unpacked image. ``size``: bytes of its files, of which others may use some, too; ``names``: what finds it."""

    id: str
    config: ImageConfig
    layers: tuple[str, ...]
    size: int
    made: float
    names: tuple[str, ...] = ()
    root: Path
    """Its files. Nobody may write to them."""

    @property
    def short(self) -> str:
        """The beginning of the identity, as others print it."""
        return self.id.removeprefix("sha256:")[:12]


class ImageSource(Protocol):
    """Where an image comes from. Its methods block."""

    def image(self) -> SourceImage:
        """The image. Raises ``RLError``."""
        ...

    def open(self, layer: str, stop: threading.Event) -> IO[bytes]:
        """A layer; ``stop`` ends a download. Raises ``RLError`` and ``OSError``."""
        ...


Telling = Callable[[str], None]
"""Told what is done now."""


class ImageStore:
    """Images in ``folder``, which processes may share."""

    def __init__(self, folder: Path, limits: ImageLimits | None = None) -> None:
        self._cache = Cache(folder)
        self.limits = limits or ImageLimits()

    @property
    def scratch(self) -> Path:
        """A folder for what is of use for a moment."""
        return self._cache.path("scratch", "any").parent

    @property
    def blobs(self) -> Path:
        """A folder for compressed layers, which are kept until their image is unpacked."""
        return self._cache.path("blobs", "any").parent

    @property
    def runs(self) -> Path:
        """A folder for writable layers; their names begin with their process's number."""
        return self._cache.path("runs", "any").parent

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, nothing is removed. Raises ``ConfigError`` while something is being removed."""
        with self._lock(fcntl.LOCK_SH, "images are being removed at this moment; try again"):
            yield

    def find(self, name: str) -> StoredImage | None:
        """The image of a name, or of the beginning of an identity."""
        file = self._name(name)
        if file.is_file():
            return self._read(json.loads(file.read_text())["image"])
        digits = name.removeprefix("sha256:")
        if len(digits) < 6 or not all(each in "0123456789abcdef" for each in digits):
            return None
        found = [each for each in self.images() if each.id.removeprefix("sha256:").startswith(digits)]
        return found[0] if len(found) == 1 else None

    def images(self) -> list[StoredImage]:
        """All images, the newest first."""
        folders = [each.name for each in self._cache.path("roots", "any").parent.iterdir() if _MAKING not in each.name]
        found = [image for name in folders if (image := self._read(f"sha256:{name}")) is not None]
        return sorted(found, key=lambda image: image.made, reverse=True)

    def on_disk(self) -> int:
        """Bytes of all layers, each counted once."""
        layers = self._cache.path("layers", "any").parent
        return sum(read_facts(each).size for each in layers.iterdir() if _MAKING not in each.name)

    async def pull(self, source: ImageSource, names: tuple[str, ...], said: Telling = lambda text: None) -> StoredImage:
        """Unpack an image unless it is there, and give it ``names``. Call it inside ``in_use``.

        Raises ``RLError`` and ``OSError``. What a killed process left is made anew.
        """
        image = await asyncio.to_thread(source.image)
        folders = [await self._layer(source, image, at, said) for at in range(len(image.layers))]
        place = self._cache.path("roots", _digits(image.id))

        async def make(into: Path) -> None:
            said(f"making the files of {image.id[7:19]}")
            size = sum(read_facts(each).size for each in folders)
            if size > self.limits.size:
                raise too_large(names[0])
            await in_thread(lambda stop: assemble(folders, into / ROOT, stop=stop))
            made = {"config": image.config.model_dump(), "layers": image.config.diff_ids, "size": size}
            write_file(into / _IMAGE, json.dumps({"id": image.id, **made, "made": time.time()}), PRIVATE)

        await self._cache.made(place, make)
        self.give_names(image.id, names)
        found = self._read(image.id)
        assert found is not None
        return found

    def give_names(self, identity: str, names: tuple[str, ...]) -> None:
        """Have an image found by ``names``, which may have been another's."""
        for name in names:
            write_file(self._name(name), json.dumps({"name": name, "image": identity}), PRIVATE)

    async def remove(self, images: list[StoredImage]) -> int:
        """Remove images, the layers that no other has, and what killed processes left. The bytes that this freed.

        Raises ``ConfigError`` while any image is in use.
        """
        with self._lock(fcntl.LOCK_EX, "images are in use by another process; end it, or wait for it"):
            before = self.on_disk()
            gone = {image.id for image in images}
            for file in self._name("any").parent.iterdir():
                if json.loads(file.read_text())["image"] in gone:
                    file.unlink()
            for image in images:
                await self._drop(image.root.parent)
            kept = {_digits(layer) for image in self.images() for layer in image.layers}
            for kind, names in (("roots", None), ("layers", kept), ("blobs", set()), ("scratch", set())):
                for each in list(self._cache.path(kind, "any").parent.iterdir()):
                    if _MAKING in each.name or (names is not None and each.name not in names):
                        await self._drop(each)
            return before - self.on_disk()

    async def _layer(self, source: ImageSource, image: SourceImage, at: int, said: Telling) -> Path:
        diff_id, layer = image.config.diff_ids[at], image.layers[at]
        place = self._cache.path("layers", _digits(diff_id))
        what = f"layer {at + 1} of {len(image.layers)}"

        async def make(into: Path) -> None:
            said(f"unpacking {what}")

            def unpack(stop: threading.Event) -> None:
                with source.open(layer, stop) as stream:
                    unpack_layer(stream, into, diff_id, self.limits, what=f"{what} ({layer[-64:][:12]})", stop=stop)

            await in_thread(unpack)

        await self._cache.made(place, make)
        return place

    async def _drop(self, place: Path) -> None:
        # Renamed first, so that nobody finds half of it.
        left = place.with_name(f"{place.name.partition(_MAKING)[0]}{_MAKING}removed")
        if place != left:
            await remove(left)
            place.rename(left)
        if left.is_dir():
            await remove(left)
        else:
            left.unlink(missing_ok=True)

    def _name(self, name: str) -> Path:
        return self._cache.path("names", f"{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()}.json")

    def _read(self, identity: str) -> StoredImage | None:
        folder = self._cache.path("roots", _digits(identity))
        try:
            known = json.loads((folder / _IMAGE).read_text())
        except FileNotFoundError:
            return None
        files = [json.loads(file.read_text()) for file in self._name("any").parent.iterdir()]
        names = sorted(each["name"] for each in files if each["image"] == identity)
        return StoredImage.model_validate({**known, "root": folder / ROOT, "names": names})

    @contextmanager
    def _lock(self, kind: int, refused: str) -> Iterator[None]:
        descriptor = os.open(self._cache.path("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(refused) from error
        try:
            yield
        finally:
            os.close(descriptor)


def _digits(digest: str) -> str:
    kind, _, digits = digest.partition(":")
    if kind != "sha256" or not digits.isalnum():
        raise BadEnvironmentError(f"{digest[:80]!r} is no sha256 digest")
    return digits


async def in_thread[T](work: Callable[[threading.Event], T]) -> T:
    """Run ``work`` in a thread. When this task is cancelled, the event is set and the thread's end awaited."""
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        raise
