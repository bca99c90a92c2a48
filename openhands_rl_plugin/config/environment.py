"""The environment that the settings name, composed in one place for everyone who plays episodes."""

from __future__ import annotations

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import Environment


def make_environment(settings: RLSettings) -> Environment:
    """A fresh environment of ``[rl] env_name``, at the configured address. Raises ``ConfigError``.

    A plugin's ``Options`` get what they declare of ``base_url`` and ``react_format``, and ``[rl.environment]``.
    """
    declared = getattr(registry.load("environments", settings.env_name), "Options", None)
    fields = declared.model_fields if declared is not None else {}
    known = {"base_url": settings.environment_url, "react_format": settings.react_format}
    options = {name: value for name, value in known.items() if name in fields} | settings.environment
    return registry.build("environments", settings.env_name, options)
