"""The back ends that set up and grade instances, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.backends.caching import Cache, default_cache
from openhands_rl_plugin.evals.swe.backends.docker import DockerBackend
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import CloneSource, MirrorSource
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.tasks.repair.backend import RepairBackend
from openhands_rl_plugin.evals.tasks.sources.task_repositories import TaskRepositories

BackendName = Literal["local", "docker"]


def make_backend(
    name: BackendName, *, mirror: Path | None = None, cache: Path | None = None, network: bool = False
) -> InstanceBackend:
    """The back end of that name. ``mirror``: a folder of git repositories to use instead of clones from GitHub.

    Repositories of ``swe-local`` tasks are made from the packages in their rows, those of repair tasks from their
    files. ``network``: tests may use it.
    The reward-hack guard is always on. Raises ``ConfigError``.
    """
    if mirror is not None and not mirror.is_dir():
        raise ConfigError(f"--mirror {mirror}: no such folder")
    guard = RewardHackGuard()
    if name == "docker":
        return DockerBackend(mirror=mirror, guard=guard, network=network)
    place = cache or default_cache()
    others = CloneSource(Cache(place)) if mirror is None else MirrorSource(mirror)
    local = LocalBackend(cache=place, sources=[TaskRepositories(place), others], guard=guard, network=network)
    return RepairBackend(local)
