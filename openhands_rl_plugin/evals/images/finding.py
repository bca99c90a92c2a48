"""Finds the image of a name: in a file, in a folder of files, in the cache."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.images.archives import OpenedFile
from openhands_rl_plugin.evals.images.manifests import Platform
from openhands_rl_plugin.evals.images.references import Reference, find_file
from openhands_rl_plugin.evals.images.registry import RegistrySource
from openhands_rl_plugin.evals.images.sif import SifFile, is_sif
from openhands_rl_plugin.evals.images.store import ImageStore, StoredImage, Telling, in_thread

FILE = "file:"
"""The beginning of the names by which a file's image is known."""


class ImageFinder:
    """Images for one platform. ``place``: a folder of archives and layouts, left out: none. ``registry``: the address
    of one that is asked for all images, left out: that of an image's name.
    """

    def __init__(
        self, store: ImageStore, wanted: Platform | None = None, place: Path | None = None, registry: str = ""
    ) -> None:
        self.store = store
        self._wanted = wanted or Platform.here()
        self._place = place
        self._registry = registry

    async def find(self, name: str, said: Telling = lambda text: None) -> StoredImage:
        """The image of a name: in the folder, in the cache, or of a registry. Call it inside the store's ``in_use``.

        Raises ``ConfigError`` where there is none, ``BadEnvironmentError`` for a damaged one, ``InfrastructureError``.
        """
        reference = Reference.parse(name)
        if self._place is not None and (file := find_file(self._place, reference)) is not None:
            return await self.from_file(file, name, said)
        known = self.store.find(str(reference))
        if known is not None and known.config.platform == str(self._wanted):
            return known
        return await self.from_registry(reference, said)

    async def from_registry(self, reference: Reference, said: Telling = lambda text: None) -> StoredImage:
        """What a registry has by that name now. Raises as ``find`` does."""
        limits, done = self.store.limits, False
        source = RegistrySource(reference, self._wanted, self.store.blobs, limits, address=self._registry)
        said(f"asking for {reference}")
        try:
            image = await self.store.pull(source, (str(reference),), said)
            done = True
        finally:
            source.close(done=done)
        return image

    async def from_file(self, path: Path, name: str = "", said: Telling = lambda text: None) -> StoredImage:
        """The image in a layout, an archive or a ``.sif``; of several that of ``name``, which finds it then.

        Raises as ``find`` does.
        """
        path = path.absolute()
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file")
        own = f"{FILE}{path}:{_state(path)}:{self._wanted}:{name}"
        names = (own, *((str(Reference.parse(name)),) if name else ()))
        if (known := self.store.find(own)) is not None:
            self.store.give_names(known.id, names)
            return known
        said(f"reading {path.name}")
        if path.is_file() and is_sif(path):
            return await self.store.pull(await in_thread(SifFile(path, self._wanted).open), names, said)
        opened = OpenedFile(path, self._wanted, name, scratch=self.store.scratch, limits=self.store.limits)
        try:
            return await self.store.pull(await in_thread(opened.open), names, said)
        finally:
            opened.close()


def _state(path: Path) -> str:
    found = (path / "index.json" if path.is_dir() and (path / "index.json").is_file() else path).stat()
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
