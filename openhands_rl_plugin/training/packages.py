"""Whether the package of another engine is installed, in a version that is known."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from openhands_rl_plugin.config.engines import engine_named
from openhands_rl_plugin.core.errors import ConfigError


def check_package(name: str, what: str = "") -> None:
    """Raise ``ConfigError`` unless the engine's package fits. ``what``: who needs it, if it is not the engine."""
    engine, what = engine_named(name), what or f'[rl.training] engine = "{name}"'
    remedy = f"pip install '{engine.requires}'"
    try:
        found = Version(version(engine.package))
    except (PackageNotFoundError, InvalidVersion) as error:
        raise ConfigError(f"{what} needs {engine.title}, which is not installed: {remedy}") from error
    if not SpecifierSet(engine.requires.removeprefix(engine.package)).contains(found, prereleases=True):
        raise ConfigError(f"{what} does not know {engine.title} {found}: {remedy}")
