"""The storage that the settings name, opened in one place for everyone who plays episodes."""

from __future__ import annotations

from collections.abc import Mapping

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage


def open_storage(settings: RLSettings, environ: Mapping[str, str] | None = None) -> TrajectoryStorage:
    """``[rl] storage_backend`` with what ``[rl.storage]`` says; a guest's class gets ``path`` and ``durable``.

    ``environ`` (default: the process's) holds the connection string of MongoDB. Raises ``ConfigError``, and
    ``MissingExtraError`` without the client that the storage needs.
    """
    storage = settings.storage
    options: dict[str, object] = {"durable": storage.durable}
    if settings.storage_backend == "mongodb":
        options |= {"connection_string": storage.connection_string(environ), "database_name": storage.database}
    else:
        options |= {"path": str(storage.directory)}
    return registry.build("storages", settings.storage_backend, options)
