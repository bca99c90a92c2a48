"""The only module that names hosts: their runners in this process. Importing it does not import OpenHands."""

from __future__ import annotations

from typing import Protocol

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.environment_sessions import EnvironmentSessions
from openhands_rl_plugin.hosts.shared.options import HostOptions, check_isolation, check_prompt
from openhands_rl_plugin.rollout.journal import EpisodeSink


class HostRunner(Protocol):
    """An ``EpisodeRunner`` over OpenHands, which can also be given the workspace of an episode."""

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        ...

    async def close(self) -> None:
        """Release sessions, threads and workers."""
        ...


def local_runner(
    settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
) -> HostRunner:
    """A runner whose sessions run in this process, of the host that ``[rl] host`` says.

    OpenHands V1 has no part in episodes of an environment: there are no tools in them. Raises ``ConfigError`` for
    settings that the host cannot use.
    """
    options = options or HostOptions()
    check_isolation(settings, options)
    check_prompt(settings, options)
    if host_of(settings) == "v0":
        from openhands_rl_plugin.hosts.v0.driver import ControllerRunner

        return ControllerRunner(settings, options, storage=storage)
    if options.environment_mode:
        return EnvironmentSessions(settings, options, storage=storage)
    from openhands_rl_plugin.hosts.v1.driver import ConversationRunner

    return ConversationRunner(settings, options, storage=storage)
