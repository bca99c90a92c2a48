"""Instances in the official images of SWE-bench and SWE-Gym without a container engine: unpacked once, by bubblewrap.

Scripts, markers and verdicts are those of the other back ends; only the ``Box`` differs.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.environments.workspace.processes import Ended, Prelude, run
from openhands_rl_plugin.evals.images.finding import ImageFinder
from openhands_rl_plugin.evals.images.paths import inside
from openhands_rl_plugin.evals.images.sandbox import FreshRoot, ImageSandbox, fresh_root
from openhands_rl_plugin.evals.images.store import StoredImage
from openhands_rl_plugin.evals.swe.backends.caching import copy_tree, remove
from openhands_rl_plugin.evals.swe.backends.docker import ENVIRONMENT, from_github, from_mirrors, with_services
from openhands_rl_plugin.evals.swe.backends.guard_folder import GUARD, GUARD_OUT, make_guard_folders, read_left
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceLimits, Shown, check_bubblewrap
from openhands_rl_plugin.evals.swe.grading import (
    PATCH_INSIDE,
    SCRIPT_INSIDE,
    Guard,
    GuardEquipment,
    NoGuard,
    evaluate,
    grade_and_log,
)
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, Mount, PatchVerdict

_TESTBED = "/testbed"


class ImageBackend:
    """Grades each patch in a fresh writable layer above the image's files.

    ``mirror``: as for ``DockerBackend``. ``network`` is for the tests.
    """

    name = "image"

    def __init__(
        self,
        finder: ImageFinder,
        *,
        mirror: Path | None = None,
        guard: Guard | None = None,
        limits: InstanceLimits | None = None,
        network: bool = False,
    ) -> None:
        self._finder = finder
        self._sources = [] if mirror is None else [MirrorSource(mirror)]
        self._guard = guard or NoGuard()
        self._sandbox = ImageSandbox(limits)
        self._network = network

    async def check(self) -> None:
        """Raise ``ConfigError`` without bubblewrap. Removes what killed processes left."""
        await asyncio.to_thread(check_bubblewrap)
        for left in self._finder.store.runs.iterdir():
            if not Path("/proc", left.name.partition("-")[0]).exists():
                await remove(left)

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """Copy the repository out of the image; its environment is shown read-only.

        Raises ``InfrastructureError``, ``ConfigError`` and ``BadEnvironmentError``.
        """
        with self._finder.store.in_use():
            image = await self._image(instance, await self._recipe(instance))
            await copy_tree(_in(image, _TESTBED), directory)
            # An episode is long, and images may be removed meanwhile.
            environment = directory.with_name(f"{directory.name}.environment")
            await copy_tree(_in(image, ENVIRONMENT), environment)
        return Checkout(
            directory=directory,
            mounts=(Mount(host=environment, inside=ENVIRONMENT), Mount(host=directory, inside=_TESTBED)),
            variables={"PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin", "CONDA_DEFAULT_ENV": "testbed"},
        )

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            recipe = await self._recipe(instance)
            written.write_script(recipe.evaluation_script)
            with self._finder.store.in_use():
                image = await self._image(instance, recipe)
                async with self._box(image, self._guard.equipment(instance)) as box:
                    written.note(f"image {image.id}, writable layer: {box.fresh.method}")
                    verdict = await evaluate(box, instance, recipe, patch, written, timeout=timeout, guard=self._guard)
            return with_services(verdict, recipe, network=self._network)

        return await grade_and_log(instance, patch, written, grade)

    async def close(self) -> None:
        """Nothing to release; images stay."""

    async def _recipe(self, instance: Instance) -> Recipe:
        read_file = from_mirrors(self._sources) if self._sources else from_github
        return await asyncio.to_thread(recipe_of, instance, read_file)

    async def _image(self, instance: Instance, recipe: Recipe) -> StoredImage:
        if recipe.image is None:
            raise ConfigError(f"{instance.instance_id}: its row names no image; use --backend local")
        image = await self._finder.find(recipe.image)
        _in(image, _TESTBED)
        return image

    @asynccontextmanager
    async def _box(self, image: StoredImage, equipment: GuardEquipment) -> AsyncIterator[ImageBox]:
        scratch = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._finder.store.runs))
        try:
            make_guard_folders(scratch, equipment)
            (scratch / "eval.sh").touch()
            (scratch / "files").mkdir()
            fresh = await fresh_root(image, scratch / "files")
            yield ImageBox(self._sandbox, fresh, equipment, scratch, network=self._network)
        finally:
            await remove(scratch)


class ImageBox:
    """An image's files with changes of their own, in ``scratch``. Its commands are root's, as in a container."""

    def __init__(
        self, sandbox: ImageSandbox, fresh: FreshRoot, equipment: GuardEquipment, scratch: Path, *, network: bool
    ) -> None:
        self.fresh = fresh
        self._sandbox = sandbox
        self._variables = equipment.variables
        self._scratch = scratch
        self._network = network

    async def put(self, inside: str, text: str) -> None:
        """Write the patch or the script; the script is shown read-only."""
        place = {PATCH_INSIDE: self.fresh.tmp / "patch.diff", SCRIPT_INSIDE: self._scratch / "eval.sh"}[inside]
        place.unlink(missing_ok=True)  # the image may have put a link there
        await asyncio.to_thread(place.write_bytes, text.encode())

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        given: bytes | None = None,
        tests: bool = False,
        prelude: Prelude | None = None,
    ) -> Ended:
        """Run in a sandbox that ends with the command and kills all of its processes."""
        script = Shown(self._scratch / "eval.sh", SCRIPT_INSIDE)
        folders = (Shown(self._scratch / "guard", GUARD), Shown(self._scratch / "out", GUARD_OUT, writable=True))
        wrapped = self._sandbox.wrap(
            self.fresh,
            command,
            workdir=_TESTBED,
            user="root",
            network=tests and self._network,
            shown=(*folders, script) if tests else (),
            variables=self._variables if tests else {},
        )
        return await run(wrapped, timeout=timeout, given=given, prelude=prelude)

    async def left(self) -> Mapping[str, bytes]:
        """Regular files in the guard's folder, without too large ones."""
        return read_left(self._scratch)


def _in(image: StoredImage, path: str) -> Path:
    found = inside(image.root, path)
    if found is None or not found.is_dir():
        raise BadEnvironmentError(f"the image {image.short} has no folder {path}, where images of instances have it")
    return found
