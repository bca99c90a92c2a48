"""The back ends that set up and grade instances, by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.runs.suites import own_suite_of, own_suites
from openhands_rl_plugin.evals.swe.backends.caching import Cache, default_cache
from openhands_rl_plugin.evals.swe.backends.docker import DockerBackend
from openhands_rl_plugin.evals.swe.backends.image import REGISTRIES, ImageBackend
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import CloneSource, MirrorSource
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, InstanceBackend, PatchVerdict
from openhands_rl_plugin.evals.tasks.packages import TaskRepositories

BackendName = Literal["local", "docker", "image"]


def is_light(instance: Instance) -> bool:
    """Whether a task is of another package's suite, and needs no environment of its own."""
    return own_suite_of(instance) is not None


class _ByRow:
    """Gives the rows of other packages' suites to their back ends, and all others to ``other``."""

    def __init__(self, other: InstanceBackend | None) -> None:
        self._own = {each.column: each.backend() for each in own_suites() if each.column}
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
        return [*self._own.values(), *([self._other] if self._other is not None else [])]

    def _of(self, instance: Instance) -> InstanceBackend:
        if (own := own_suite_of(instance)) is not None:
            return self._own[own.column]
        if self._other is None:
            raise ConfigError(f"{instance.instance_id} needs an environment of its own")
        return self._other


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
        return _ByRow(None)
    guard = RewardHackGuard()
    if name == "docker":
        return DockerBackend(mirror=mirror, guard=guard, network=network)
    if name == "image":
        return ImageBackend(place, source=images, mirror=mirror, guard=guard, network=network)
    others = CloneSource(Cache(place)) if mirror is None else MirrorSource(mirror)
    local = LocalBackend(cache=place, sources=[TaskRepositories(place), others], guard=guard, network=network)
    return _ByRow(local)
