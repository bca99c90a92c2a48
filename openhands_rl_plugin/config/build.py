"""Settings -> objects: the environment, strategy, reward and storage that ``[rl]`` names.

Every function raises ``ConfigError`` for a name that cannot be loaded and for wrong options.
"""

from __future__ import annotations

from collections.abc import Mapping

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.core.protocols import Environment, Reward, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.types import StrategySpec


def make_environment(settings: RLSettings) -> Environment:
    """A new environment of ``[rl] env_name``, at the configured address.

    A plugin's ``Options`` get ``base_url`` and ``react_format`` where they declare them, and ``[rl.environment]``.
    """
    declared = getattr(registry.load("environments", settings.env_name), "Options", None)
    fields = declared.model_fields if declared is not None else {}
    known = {"base_url": settings.environment_url, "react_format": settings.react_format}
    options = {name: value for name, value in known.items() if name in fields} | settings.environment
    return registry.build("environments", settings.env_name, options)


def make_strategy(settings: RLSettings) -> Strategy:
    """A new strategy of ``[rl] rollout_strategy`` with the options of ``[rl.strategy]``."""
    return registry.build("strategies", settings.rollout_strategy, settings.strategy)


def strategy_spec(settings: RLSettings) -> StrategySpec:
    """The same strategy as it is recorded in a trajectory."""
    return StrategySpec(name=settings.rollout_strategy, options=settings.strategy)


def make_reward(settings: RewardSettings) -> Reward:
    """The reward that ``[rl.reward]`` names, with its options."""
    return registry.build("rewards", settings.name, settings.options)


def open_storage(settings: RLSettings, environ: Mapping[str, str] | None = None) -> TrajectoryStorage:
    """The storage of ``[rl] storage_backend`` with ``[rl.storage]``; a guest's class gets ``path`` and ``durable``.

    ``environ`` (default: the process's) holds the connection string of MongoDB. Raises ``MissingExtraError`` without
    the client library that the storage needs.
    """
    storage = settings.storage
    options: dict[str, object] = {"durable": storage.durable}
    if settings.storage_backend == "mongodb":
        options |= {"connection_string": storage.connection_string(environ), "database_name": storage.database}
    else:
        options |= {"path": str(storage.directory)}
    return registry.build("storages", settings.storage_backend, options)
