"""What ``[rl.workspace]`` means for a sandbox."""

from __future__ import annotations

from openhands_rl_plugin.config.workspace import WorkspaceSettings
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits
from openhands_rl_plugin.environments.workspace.visible import HostPaths

_MEBIBYTE = 1024**2


def limits_of(settings: WorkspaceSettings) -> SandboxLimits:
    """The limits of a session."""
    return SandboxLimits(
        memory=settings.memory * _MEBIBYTE,
        processes=settings.processes,
        temporary=settings.temporary * _MEBIBYTE,
        disk=settings.disk * _MEBIBYTE,
    )


def paths_of(settings: WorkspaceSettings) -> HostPaths:
    """The paths of the host that a session sees beside the system's."""
    return HostPaths(visible=settings.visible_paths, writable=settings.writable_paths)
