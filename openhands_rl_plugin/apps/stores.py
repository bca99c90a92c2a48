"""STORE, as commands take it: a folder, a database's URI, a variable that holds one, or a ``config.toml``."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from openhands_rl_plugin.config.build import mongodb_options, open_storage
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, DamagedError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import DamagedRecord

_MONGODB = ("mongodb://", "mongodb+srv://")
_CONFIGURATION = ".toml"


def storage_at(where: str) -> TrajectoryStorage:
    """The storage of a folder (created at the first write), of a database, or of a ``config.toml``'s ``[rl.storage]``.

    Raises ``ConfigError``.
    """
    if where.endswith(_CONFIGURATION):
        return open_storage(load_settings(Path(where).expanduser()))
    if (uri := _mongodb_uri(where)) is None:
        return build("storages", "file", {"path": where})
    return build("storages", "mongodb", mongodb_options(uri))


@asynccontextmanager
async def open_store(
    where: str, *, create: bool = False, skip_damaged: bool | None = None
) -> AsyncIterator[TrajectoryStorage]:
    """The store at a path or URI; reading never creates one. Raises ``ConfigError`` or ``StorageError``.

    ``skip_damaged``: leave out what cannot be read, and say what that is on standard error; ``None`` for a command
    without that option, whose error does not name it.
    """
    from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

    storage = storage_at(where)
    lost: list[DamagedRecord] = []
    try:
        parts = [Path(where).expanduser() / name for name in ("trajectories.sqlite", "trajectories")]
        if not create and is_folder(where) and not any(part.exists() for part in parts):
            raise ConfigError(f"{where}: this is no folder with trajectories; give the folder in [rl.storage] path")
        if skip_damaged is not None and isinstance(storage, FileTrajectoryStorage):
            await storage.check()
        if skip_damaged:
            lost = storage.skip_damaged()
        yield storage
    except DamagedError as error:
        if skip_damaged is not False:
            raise
        raise DamagedError(f"{error}. --skip-damaged reads everything else") from error
    finally:
        for record in lost:
            print(f"left out, as it cannot be read: {record.in_words()}", file=sys.stderr)
        await storage.close()


def is_folder(where: str) -> bool:
    """Whether a STORE is given by its folder. Raises ``ConfigError`` for a URI that cannot be used."""
    return not where.endswith(_CONFIGURATION) and _mongodb_uri(where) is None


def _mongodb_uri(where: str) -> str | None:
    """The URI, or ``None`` for a path. Refuses a password, as other users can see the command line."""
    variable, _, name = where.partition(":")
    if variable == "env":
        if not (uri := os.environ.get(name, "")).startswith(_MONGODB):
            raise ConfigError(f"the environment variable {name} is not set to a URI that begins with {_MONGODB[0]}")
        return uri
    if where.startswith(_MONGODB) and urlsplit(where).password is not None:
        raise ConfigError(
            "other users can see a password here: put the URI into an environment variable, give env:NAME"
        )
    return where if where.startswith(_MONGODB) else None
