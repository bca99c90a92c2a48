"""The back ends that set up and grade instances, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from openhands_rl_plugin.contrib.repair.backend import RepairBackend
from openhands_rl_plugin.contrib.repair.rows import is_repair
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.backends.caching import Cache, default_cache
from openhands_rl_plugin.evals.swe.backends.docker import DockerBackend
from openhands_rl_plugin.evals.swe.backends.image import REGISTRIES, ImageBackend
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import CloneSource, MirrorSource
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict
from openhands_rl_plugin.evals.tasks.sources.task_repositories import TaskRepositories

BackendName = Literal["local", "docker", "image"]


_LIGHT: Mapping[Callable[[Instance], bool], Callable[[Path], InstanceBackend]] = {
    is_repair: lambda cache: RepairBackend(),
}
"""Kinds of rows whose tasks need no environment, and what sets them up and grades them."""


def is_light(instance: Instance) -> bool:
    """Whether a task needs no environment of its own."""
    return any(holds(instance) for holds in _LIGHT)


class _ByRow:
    """Gives every row to the back end of its kind, and those of no kind to ``other``."""

    def __init__(self, cache: Path, other: InstanceBackend | None) -> None:
        self._light = [(holds, make(cache)) for holds, make in _LIGHT.items()]
        self._other = other
        self.name = "local"

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        for backend in self._all():
            await backend.check()

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """As in ``InstanceBackend``."""
        return await self._of(instance).checkout(instance, directory)

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """As in ``InstanceBackend``."""
        return await self._of(instance).grade(instance, patch, logs=logs, timeout=timeout)

    async def close(self) -> None:
        """Close them all."""
        for backend in self._all():
            await backend.close()

    def _all(self) -> list[InstanceBackend]:
        return [*(backend for _, backend in self._light), *([self._other] if self._other is not None else [])]

    def _of(self, instance: Instance) -> InstanceBackend:
        found = next((backend for holds, backend in self._light if holds(instance)), self._other)
        if found is None:
            raise ConfigError(f"{instance.instance_id} needs an environment of its own")
        return found


def make_backend(
    name: BackendName,
    *,
    mirror: Path | None = None,
    cache: Path | None = None,
    network: bool = False,
    instances: Iterable[Instance] | None = None,
    images: str = REGISTRIES,
) -> InstanceBackend:
    """The back end of that name. ``mirror``: a folder of git repositories to use instead of clones from GitHub.
    ``instances``: no others will be asked for; those that need no environment then ask for no program that makes one.

    Repositories of ``swe-local`` tasks are made from the packages in their rows, those of repair tasks from their
    files. ``network``: tests may use it. ``images``: what ``skopeo`` reads before an image's name.
    The reward-hack guard is always on. Raises ``ConfigError``.
    """
    if mirror is not None and not mirror.is_dir():
        raise ConfigError(f"--mirror {mirror}: no such folder")
    place = cache or default_cache()
    if instances is not None and all(map(is_light, instances)):
        return _ByRow(place, None)
    guard = RewardHackGuard()
    if name == "docker":
        return DockerBackend(mirror=mirror, guard=guard, network=network)
    if name == "image":
        return ImageBackend(place, source=images, mirror=mirror, guard=guard, network=network)
    others = CloneSource(Cache(place)) if mirror is None else MirrorSource(mirror)
    local = LocalBackend(cache=place, sources=[TaskRepositories(place), others], guard=guard, network=network)
    return _ByRow(place, local)
