"""Which host plays: the only place that names one. Importing this imports no OpenHands."""

from __future__ import annotations

from typing import Protocol

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.place import Place
from openhands_rl_plugin.hosts.shared.options import ControllerOptions
from openhands_rl_plugin.rollout.journal import EpisodeSink


class HostRunner(Protocol):
    """An ``EpisodeRunner`` that can also be told in which workspace an episode takes place."""

    async def run(self, request: EpisodeRequest, place: Place | None = None) -> Trajectory: ...

    async def close(self) -> None: ...


def host_runner(
    settings: RLSettings, options: ControllerOptions | None = None, *, storage: EpisodeSink | None = None
) -> HostRunner:
    """A runner that plays episodes in this process. Raises ``ConfigError`` as ``ControllerRunner`` does."""
    from openhands_rl_plugin.hosts.v0.driver import ControllerRunner

    return ControllerRunner(settings, options, storage=storage)
