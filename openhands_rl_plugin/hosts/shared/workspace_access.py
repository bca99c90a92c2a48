"""What ``[rl.workspace]`` means for a sandbox."""

from __future__ import annotations

import os
from collections.abc import Mapping

from openhands_rl_plugin.config.network import IndexAddresses, hosts_of, index_addresses
from openhands_rl_plugin.config.workspace import WorkspaceSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.network.allowed import AllowedNetwork
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits
from openhands_rl_plugin.environments.workspace.visible import HostPaths

_MEBIBYTE = 1024**2
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
# Where a sandbox shows certificates.
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_SHOWN = ("/etc/ssl/cert", "/etc/pki/tls/cert", "/etc/pki/ca-trust/")


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


def network_of(
    settings: WorkspaceSettings, *, whole: bool = False, environ: Mapping[str, str] = os.environ
) -> AllowedNetwork | bool:
    """What a session may reach, with the package index of this machine where ``pypi`` is: nothing, or the ``whole``
    network. Raises ``ConfigError`` where hosts and all of it are asked for, and behind a proxy of the host.
    """
    if not settings.network:
        return whole
    if whole:
        raise ConfigError(
            "[rl.workspace] network: [sandbox] use_host_network = true opens all of it; remove one of the two"
        )
    if by := next((name for name in _PROXIES if environ.get(name)), None):
        raise ConfigError(
            f"[rl.workspace] network: the proxy of {by} is not used for sessions, which would reach nothing; empty the "
            "setting, or unset the variable where this machine reaches the hosts without it"
        )
    index = index_addresses(environ) if "pypi" in settings.network else IndexAddresses((), {})
    trusted = {name: environ[name] for name in _CERTIFICATES if environ.get(name, "").startswith(_SHOWN)}
    return AllowedNetwork(
        hosts=hosts_of(settings.network),
        index=index.targets,
        variables={**trusted, **index.variables},
        traffic=settings.traffic * _MEBIBYTE,
    )
