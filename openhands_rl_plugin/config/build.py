"""Settings -> objects: the environment, strategy, reward and storage that ``[rl]`` names.

Every function raises ``ConfigError`` for a name that cannot be loaded and for wrong options.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.protocols import Environment, LLMEngine, Reward, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.types import StrategySpec


def make_environment(settings: RLSettings) -> Environment:
    """A new environment of ``[rl] env_name``, at the configured address.

    It gets ``base_url``, ``react_format`` and ``max_turns``, as far as it declares them, and ``[rl.environment]``.
    """
    known = {
        "base_url": settings.environment_url,
        "react_format": settings.react_format,
        "max_turns": settings.max_turns,
    }
    return _build("environments", settings.env_name, known, settings.environment)


def make_engine(settings: RLSettings, *, model: str, base_model: str, base_url: str = "") -> LLMEngine:
    """A new engine of ``[rl] engine`` that samples from the weights with the served name ``model``.

    It gets ``model``, ``base_model``, ``base_url``, ``api_key`` and ``timeout`` (seconds), as far as it declares them,
    and ``[rl.engine_options]``, which come first.
    """
    serving = settings.serving
    known = {"model": model, "base_model": base_model, "base_url": base_url, "timeout": serving.request_timeout}
    return _build("engines", settings.engine, known | {"api_key": serving.api_key()}, settings.engine_options)


def check_environment_server(settings: RLSettings) -> None:
    """Raise ``ConfigError`` where nothing listens at the address of ``[rl] env_name``. Sends nothing.

    An environment without an address (its ``Options`` have no ``base_url``) runs in this process: it is made once, so
    that a library or an option that is missing is an error before the first episode.
    """
    if "base_url" not in registry.accepted(registry.load("environments", settings.env_name)).model_fields:
        make_environment(settings)
        return
    url = urlsplit(str(settings.environment.get("base_url") or settings.environment_url))
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"no server of the environment {settings.env_name} answers at {url.geturl()} ({describe(error)}): start "
            "it, or correct env_server_base and env_port in [rl]"
        ) from error


def make_strategy(settings: RLSettings) -> Strategy:
    """A new strategy of ``[rl] rollout_strategy`` with the options of ``[rl.strategy]``."""
    return registry.build("strategies", settings.rollout_strategy, settings.strategy)


def strategy_spec(settings: RLSettings) -> StrategySpec:
    """The same strategy as it is recorded in a trajectory."""
    return StrategySpec(name=settings.rollout_strategy, options=settings.strategy)


def make_reward(settings: RewardSettings) -> Reward:
    """The reward that ``[rl.reward]`` names, with its options."""
    return registry.build("rewards", settings.name, settings.options)


OF_RETURN = frozenset({"return", "success", "success-bonus"})
"""The rewards that are functions of the return, so that a criterion on the return applies."""

# By the last part of an environment's name.
_CRITERIA: Mapping[str, SuccessRule] = {
    "babyai": SuccessRule(at=0.5),  # 1 - 0.9 x steps / limit, and its server ends no level at 0.5 or below
    "grid_world": SuccessRule(at=None, ended=True),  # -0.1 a step; it ends at the goal alone
    "maze": SuccessRule(at=None, ended=True),
}


def success_rule(environment: str, reward: RewardSettings | None = None, at: float | None = None) -> SuccessRule:
    """The criterion in force: ``at``, else the threshold of ``[rl.reward]``, else the environment's own.

    The latter is that of its class (``success_rule``), else a return of 1.0.
    """
    given = reward.options.get("threshold") if at is None and reward and reward.name in OF_RETURN else at
    return SuccessRule(at=float(given)) if isinstance(given, int | float) else _own_rule(environment)


@cache
def _own_rule(environment: str) -> SuccessRule:
    """Classes are asked by their registered names only: stores name environments."""
    if (known := _CRITERIA.get(environment.rpartition("/")[2])) is not None:
        return known
    (kind, _, name), plugin = environment.partition("/"), None
    with suppress(ConfigError):  # of a package that is not here
        plugin = registry.load("environments", kind) if kind in registry.names("environments") else None
    asked = getattr(plugin, "success_rule", None)
    return SuccessRule() if asked is None else asked(name)


def open_storage(settings: RLSettings) -> TrajectoryStorage:
    """The storage of ``[rl] storage_backend`` with ``[rl.storage]``.

    A guest's class gets ``path`` and ``durable``, as far as it declares them, and ``[rl.storage.options]``.

    Raises ``MissingExtraError`` without the client library that the storage needs.
    """
    storage = settings.storage
    known: dict[str, object] = {"durable": storage.durable}
    if settings.storage_backend == "mongodb":
        known |= mongodb_options(storage.connection_string())
    else:
        known |= {"path": str(storage.directory)}
    return _build("storages", settings.storage_backend, known, storage.options)


def mongodb_options(uri: str) -> dict[str, str]:
    """The options of the storage ``mongodb`` for a URI, whose path may name the database; ``admin`` has accounts."""
    name = urlsplit(uri).path.strip("/")
    return {"connection_string": uri} | ({"database_name": name} if name not in ("", "admin") else {})


def _build(kind: registry.Kind, name: str, known: Mapping[str, object], options: Mapping[str, object]) -> Any:
    """The plugin with its ``options``, and with what is ``known`` here as far as it declares that."""
    declared = registry.accepted(registry.load(kind, name)).model_fields
    return registry.build(kind, name, {key: known[key] for key in known if key in declared} | dict(options))
