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
from collections.abc import Mapping, Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.environments.workspace.bubblewrap import isolate, mount_overlays
from openhands_rl_plugin.environments.workspace.inside import Bound, bounded
from openhands_rl_plugin.environments.workspace.processes import checked
from openhands_rl_plugin.evals.swe.backends.caching import Cache, copy_tree, remove, remove_left
from openhands_rl_plugin.evals.swe.backends.docker import checkout_of, image_of, platform_of, read_recipe, with_services
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.backends.sandbox import (
    AS_ROOT,
    CAPABILITIES,
    GUARD,
    GUARD_OUT,
    InstanceLimits,
    Room,
    SandboxBox,
    Shown,
    bind,
    check_bubblewrap,
    fresh_room,
)
from openhands_rl_plugin.evals.swe.grading import SCRIPT_INSIDE, Guard, NoGuard, evaluate, grade_and_log
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict

REGISTRIES = "docker://"
_TESTBED, _HOSTS, _RESOLV = "/testbed", "/etc/hosts", "/etc/resolv.conf"
_MOUNTED = ("/tmp", "/dev", "/proc", SCRIPT_INSIDE, GUARD, GUARD_OUT, _HOSTS)
_PULL_TIME = 3600.0


class ImageBackend:
    """Grades each patch in a fresh writable layer above the image's files.

    ``source``: what ``skopeo`` reads before an image's name. ``mirror``: as for ``DockerBackend``. ``network`` is for
    the tests.
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
        self._cache = Cache(cache)
        self._source = source
        self._sources = [] if mirror is None else [MirrorSource(mirror)]
        self._guard = guard or NoGuard()
        self._limits = limits or InstanceLimits()
        self._network = network

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
        root = await self._unpacked(image_of(instance, await read_recipe(instance, self._sources))) / "rootfs"
        checkout = checkout_of(directory)
        for mount in checkout.mounts:
            await copy_tree(_folder(root, mount.inside), mount.host)
        return checkout

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            recipe = await read_recipe(instance, self._sources)
            written.write_script(recipe.evaluation_script)
            bundle = await self._unpacked(image_of(instance, recipe))
            own = json.loads((bundle / "config.json").read_text())["process"].get("env", [])
            equipment = self._guard.equipment(instance)
            _folder(bundle / "rootfs", _TESTBED)
            async with fresh_room(self._runs(), bundle / "rootfs", equipment) as room:
                (room.tmp.parent / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")

                def wrap(
                    command: Sequence[str], tests: bool, shown: Sequence[Shown], variables: Mapping[str, str]
                ) -> list[str]:
                    settings = {"HOME": "/root", **dict(each.split("=", 1) for each in own), **variables}
                    return self._wrapped(room, command, shown, settings, network=tests and self._network)

                box = SandboxBox(room, equipment, wrap)
                verdict = await evaluate(box, instance, recipe, patch, written, timeout=timeout, guard=self._guard)
            return with_services(verdict, recipe, network=self._network)

        return await grade_and_log(instance, patch, written, grade)

    async def close(self) -> None:
        """Nothing to release; images stay."""

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

    def _wrapped(
        self, room: Room, command: Sequence[str], shown: Sequence[Shown], variables: Mapping[str, str], *, network: bool
    ) -> list[str]:
        """The command line that runs ``command`` as root of the image, as in a container."""
        scratch, limits = room.tmp.parent, self._limits
        mounts = [Shown(room.tmp, "/tmp", writable=True), Shown(scratch / "hosts", _HOSTS), *shown]
        mounts += [Shown(Path(_RESOLV).resolve(), _RESOLV)] if network else []
        allowed = [word for name in CAPABILITIES for word in ("--cap-add", f"CAP_{name}")]
        options = [*AS_ROOT, "--hostname", "localhost", "--die-with-parent", *allowed]
        wrapped = [
            *mount_overlays([room.overlay] if room.overlay else []),
            *("prlimit", f"--data={limits.memory}", f"--fsize={limits.file}", "--core=0", "--"),
            *isolate(["--bind", str(room.layer), "/"], network=network, options=options),
            *(word for each in mounts for word in bind(each)),
            *("--clearenv", *(word for pair in variables.items() for word in ("--setenv", *pair))),
            *("--chdir", _TESTBED, "--", *command),
        ]
        bound = Bound(
            processes=limits.processes,
            memory=limits.memory,
            disk=limits.disk,
            folder=str(room.overlay.upper if room.overlay else room.layer),
            also=(str(room.tmp),),
            isolated=False,
        )
        # The image may have no Python, so that what counts stands outside.
        return bounded(bound, sys.executable, wrapped)


def _folder(root: Path, inside: str) -> Path:
    """A folder of the image, which no link leads out of it."""
    found = root / inside.lstrip("/")
    if not found.is_dir() or not found.resolve().is_relative_to(root.resolve()):
        raise BadEnvironmentError(f"the image has no folder {inside}, where images of instances have it")
    return found
