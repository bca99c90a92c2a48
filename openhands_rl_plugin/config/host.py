"""Which OpenHands this environment has. Imports none."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError

HostName = Literal["v0", "v1"]

V0_PACKAGE, V1_PACKAGES = "openhands-ai", ("openhands-sdk", "openhands-tools")
OLDEST_SDK = (1, 15)
STOCK = "stock"
"""Names OpenHands' own agent, whichever OpenHands there is."""


class ToolNames(NamedTuple):
    """A host's names of the tools for repairs; ``finish`` and all arguments have the same names in all hosts."""

    shell: str
    editor: str


TOOLS: dict[HostName, ToolNames] = {
    "v0": ToolNames("execute_bash", "str_replace_editor"),
    "v1": ToolNames("terminal", "file_editor"),
}

_STOCK_AGENTS: dict[HostName, str] = {"v0": "CodeActAgent", "v1": "Agent"}
_FIRST_WITHOUT_V0 = (1, 7)
_EXTRAS = {"v0": "openhands", "v1": "sdk"}


def installed_hosts() -> tuple[HostName, ...]:
    """The usable hosts. V0 brings its own SDK (1.15)."""
    v0, sdk = version_of(V0_PACKAGE), [version_of(package) for package in V1_PACKAGES]
    found: list[HostName] = []
    if v0 is not None and release_of(v0) < _FIRST_WITHOUT_V0:
        found.append("v0")
    if all(each is not None and release_of(each) >= OLDEST_SDK for each in sdk):
        found.append("v1")
    return tuple(found)


def host_of(settings: RLSettings) -> HostName:
    """The host of ``[rl] host``: by default V0 where it is installed, else V1.

    Raises ``ConfigError`` with the package to install when there is none, or not the one that is set.
    """
    installed = installed_hosts()
    if settings.host != "auto":
        if settings.host in installed:
            return settings.host
        raise ConfigError(f"[rl] host: {_missing(settings.host)}")
    if installed:
        return installed[0]
    raise ConfigError(f"[rl] host: {_missing('v1')}; or V0: pip install '.[{_EXTRAS['v0']}]'")


def need_sdk() -> None:
    """Raise ``ImportError``, in one line with the remedy, where the SDK is absent or too old."""
    if "v1" not in installed_hosts():
        raise ImportError(_missing("v1"))


def agent_named(name: str, host: HostName) -> str:
    """``name``, or what the host calls its own agent."""
    return _STOCK_AGENTS[host] if name == STOCK else name


def version_of(package: str) -> str | None:
    """The installed version; ``None`` without the package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers: ``"1.58.0"`` -> ``(1, 58)``; zeros if it is no release."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _missing(host: HostName) -> str:
    packages = (V0_PACKAGE,) if host == "v0" else V1_PACKAGES
    has = ", ".join(f"{package} {found}" for package in packages if (found := version_of(package)) is not None)
    wanted = "openhands-ai 1.6" if host == "v0" else "openhands-sdk and openhands-tools 1.15 or newer"
    how = f"in an environment of its own, in a clone of the package: pip install '.[{_EXTRAS[host]}]'"
    return f"OpenHands {host.upper()} needs {wanted} ({has or 'not'} installed); {how}"
