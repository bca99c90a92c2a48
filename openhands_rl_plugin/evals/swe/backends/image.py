"""Instances in the official images of SWE-bench and SWE-Gym without a container engine: ``skopeo`` gets an image,
``umoci`` unpacks it once into the cache, and its files are ``/`` of a bubblewrap sandbox.

Scripts, markers and verdicts are those of the other back ends; only the ``Box`` differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.environments.workspace.inside import Bound, bounded
from openhands_rl_plugin.environments.workspace.processes import checked
from openhands_rl_plugin.evals.swe.backends.backend import BoxBackend
from openhands_rl_plugin.evals.swe.backends.caching import Cache, copy_tree, remove, remove_left
from openhands_rl_plugin.evals.swe.backends.docker import checkout_of, image_of, platform_of
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.backends.sandbox import (
    InstanceLimits,
    SandboxBox,
    Shown,
    as_root,
    bind,
    check_bubblewrap,
    fresh_room,
)
from openhands_rl_plugin.evals.swe.grading import Guard
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.types import Checkout, Instance

REGISTRIES = "docker://"
_TESTBED, _HOSTS, _RESOLV = "/testbed", "/etc/hosts", "/etc/resolv.conf"
_MOUNTED = ("/tmp", "/dev", "/proc", _HOSTS)
_PULL_TIME = 3600.0


class ImageBackend(BoxBackend):
    """Grades each patch in a fresh writable layer above the image's files.

    ``source``: what ``skopeo`` reads before an image's name.
    """

    name = "image"

    def __init__(
        self,
        cache: Path,
        *,
        source: str = REGISTRIES,
        mirror: Path | None = None,
        guard: Guard | None = None,
        limits: InstanceLimits | None = None,
        network: bool = False,
    ) -> None:
        super().__init__([MirrorSource(mirror)] if mirror else [], guard, network=network)
        self._cache = Cache(cache)
        self._source = source
        self._limits = limits or InstanceLimits()

    async def check(self) -> None:
        """Raise ``ConfigError`` without bubblewrap, skopeo or umoci. Removes what killed processes left."""
        await asyncio.to_thread(check_bubblewrap)
        if missing := [name for name in ("skopeo", "umoci") if shutil.which(name) is None]:
            raise ConfigError(
                f"--backend image needs {' and '.join(missing)}: apt-get install skopeo umoci; or use --backend docker "
                "(docker or podman)"
            )
        await remove_left(self._runs())

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """Copy repository and environment out of the image.

        Raises ``InfrastructureError``, ``ConfigError`` and ``BadEnvironmentError``.
        """
        root = await self._unpacked(image_of(instance, await self.recipe(instance))) / "rootfs"
        checkout = checkout_of(directory)
        for mount in checkout.mounts:
            await copy_tree(_folder(root, mount.inside), mount.host)
        return checkout

    @asynccontextmanager
    async def box(self, instance: Instance, recipe: Recipe) -> AsyncIterator[SandboxBox]:
        """A layer above the files of the instance's image, in which commands run as root, as in a container."""
        bundle, limits = await self._unpacked(image_of(instance, recipe)), self._limits
        config = json.loads((bundle / "config.json").read_text())
        own = dict(each.split("=", 1) for each in config["process"].get("env", []))
        _folder(bundle / "rootfs", _TESTBED)
        async with fresh_room(self._runs(), bundle / "rootfs") as room:
            hosts = room.tmp.parent / "hosts"
            hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
            changed, most = room.overlay.upper if room.overlay else room.layer, limits.model_dump(exclude={"file"})
            bound = Bound(**most, folder=str(changed), also=(str(room.tmp),), isolated=False)

            def wrap(command: Sequence[str], tests: bool) -> list[str]:
                network = tests and self._network
                resolving = [Shown(Path(_RESOLV).resolve(), _RESOLV)] if network else []
                mounts = [word for each in (Shown(hosts, _HOSTS), *resolving) for word in bind(each)]
                root, settings = ["--bind", str(room.layer), "/"], {"HOME": "/root", **own}
                wrapped = as_root(room, limits, root, mounts, settings, network=network)
                # The image may have no Python, so that what counts stands outside.
                return bounded(bound, sys.executable, [*wrapped, "--chdir", _TESTBED, "--", *command])

            yield SandboxBox(room, wrap)

    def _runs(self) -> Path:
        return self._cache.path("image-runs", "any").parent

    async def _unpacked(self, image: str) -> Path:
        """The folder with the image's ``rootfs`` and ``config.json``, made if missing."""
        place = self._cache.path("images", hashlib.sha256(f"{self._source}{image}".encode()).hexdigest()[:22])

        async def make(into: Path) -> None:
            system, machine = platform_of(image).split("/")
            copy = ["skopeo", "--override-os", system, "--override-arch", machine, "copy", "--quiet"]
            layout = f"{into}/layout:image"
            await checked([*copy, f"{self._source}{image}", f"oci:{layout}"], f"get {image}", timeout=_PULL_TIME)
            unpack = ["umoci", "unpack", "--rootless", "--image", layout, f"{into}/bundle"]
            await checked(unpack, f"unpack {image}", timeout=_PULL_TIME)
            await remove(into / "layout")

        await self._cache.made(place, make)
        bundle = place / "bundle"
        # bubblewrap would follow a link at the place of a mount to the host.
        mounted = (*_MOUNTED, *([_RESOLV] if self._network else ()))
        if links := [name for name in mounted if (bundle / "rootfs" / name[1:]).is_symlink()]:
            raise BadEnvironmentError(f"{image}: {', '.join(links)} must be no link")
        return bundle


def _folder(root: Path, inside: str) -> Path:
    """A folder of the image, which no link leads out of it."""
    found = root / inside.lstrip("/")
    if not found.is_dir() or not found.resolve().is_relative_to(root.resolve()):
        raise BadEnvironmentError(f"the image has no folder {inside}, where images of instances have it")
    return found
