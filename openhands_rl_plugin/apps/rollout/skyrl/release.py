"""The release of SkyRL that the classes are written for."""

from __future__ import annotations

from importlib import metadata

from openhands_rl_plugin.core.errors import ConfigError

FITS = "0.4"


def check_skyrl() -> None:
    """Raise ``ConfigError`` unless this Python has SkyRL in the release that fits."""
    how = f"pip install 'skyrl[fsdp]=={FITS}.*' 'openhands_rl_plugin[openhands]'"
    try:
        found = metadata.version("skyrl")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"SkyRL is not installed in this Python: {how}") from error
    if not f"{found}.".startswith(f"{FITS}."):
        raise ConfigError(f"this generator needs SkyRL {FITS}, and this Python has {found}: {how}")
