"""The back ends that set up and grade instances, by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.runs.suites import own_suite_of
from openhands_rl_plugin.evals.swe.backends.docker import DockerBackend
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend, default_cache
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend

BackendName = Literal["local", "docker"]


def make_backend(
    name: BackendName,
    *,
    mirror: Path | None = None,
    cache: Path | None = None,
    network: bool = False,
    instances: Iterable[Instance] = (),
) -> InstanceBackend:
    """The back end of that name, for ``instances``: tasks of another package's suite have a back end of their own.

    ``mirror``: a folder of git repositories to use instead of clones from GitHub. Repositories of ``swe-local`` tasks
    are made from the packages in their rows. ``network``: tests may use it.
    The reward-hack guard is always on. Raises ``ConfigError``.
    """
    if mirror is not None and not mirror.is_dir():
        raise ConfigError(f"--mirror {mirror}: no such folder")
    if len(suites := {own_suite_of(each) for each in instances}) == 1 and (own := suites.pop()) is not None:
        return own.backend()
    place = cache or default_cache()
    guard = RewardHackGuard(place / "calibrations")
    if name == "docker":
        return DockerBackend(guard=guard, network=network)
    return LocalBackend(cache=place, mirror=mirror, guard=guard, network=network)
