"""The STORE argument of commands: a folder, or a MongoDB database."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, DamagedError
from openhands_rl_plugin.core.protocols import SkipsDamage, TrajectoryStorage
from openhands_rl_plugin.core.records import DamagedRecord

_MOST_NAMED = 20

STORE_HELP = (
    "folder of a file store, mongodb://host/database, env:NAME of a variable that holds such a URI, or a config.toml"
)

_CONTENTS = ("trajectories.sqlite", "trajectories")
_MONGODB = ("mongodb://", "mongodb+srv://")
_VARIABLE = "env:"
_CONFIGURATION = ".toml"


def storage_at(where: str) -> TrajectoryStorage:
    """The storage of a folder (created at the first write), of a database, or of a ``config.toml``'s ``[rl.storage]``.

    Raises ``ConfigError``.
    """
    if where.endswith(_CONFIGURATION):
        return open_storage(load_settings(Path(where).expanduser()))
    uri = _mongodb_uri(where)
    if uri is None:
        return build("storages", "file", {"path": where})
    name = urlsplit(uri).path.strip("/")
    return build("storages", "mongodb", {"connection_string": uri, **({"database_name": name} if name else {})})


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
        if is_folder(where):
            _check_folder(where, create)
        if skip_damaged is not None and isinstance(storage, FileTrajectoryStorage):
            await storage.check()
        if skip_damaged:
            if not isinstance(storage, SkipsDamage):
                raise ConfigError(f"{where}: --skip-damaged works with file stores and MongoDB only")
            lost = storage.skip_damaged()
        yield storage
    except DamagedError as error:
        if skip_damaged is not False:
            raise
        raise DamagedError(f"{error}. --skip-damaged reads everything else") from error
    finally:
        _tell(lost)
        await storage.close()


def _tell(lost: Sequence[DamagedRecord]) -> None:
    """What was left out, by id, row and cause."""
    if not lost:
        return
    print(f"left out, because {len(lost)} stored record(s) cannot be read:", file=sys.stderr)
    for record in lost[:_MOST_NAMED]:
        print(f"  {record.in_words()}", file=sys.stderr)
    if len(lost) > _MOST_NAMED:
        print(f"  and {len(lost) - _MOST_NAMED} more", file=sys.stderr)


def is_folder(where: str) -> bool:
    """Whether a STORE is given by its folder. Raises ``ConfigError`` for a URI that cannot be used."""
    return not where.endswith(_CONFIGURATION) and _mongodb_uri(where) is None


def _check_folder(where: str, create: bool) -> None:
    folder = Path(where).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{where}: this is a file; give the folder of a store" + _meant(folder))
    if not create and not any((folder / name).exists() for name in _CONTENTS):
        cause = "has no trajectories in it" if folder.is_dir() else "does not exist"
        raise ConfigError(f"{where}: this folder {cause}; give the folder in [rl.storage] path")


def _meant(file: Path) -> str:
    return f", here {file.parent}" if file.name in _CONTENTS else ""


def _mongodb_uri(where: str) -> str | None:
    """The URI, or ``None`` for a path. Refuses a password, as other users can see the command line."""
    if where.startswith(_VARIABLE):
        name = where.removeprefix(_VARIABLE)
        if (uri := os.environ.get(name)) is None:
            raise ConfigError(f"the environment variable {name} is not set")
        if not uri.startswith(_MONGODB):
            raise ConfigError(f"the environment variable {name} does not begin with {' or '.join(_MONGODB)}")
        return uri
    if not where.startswith(_MONGODB):
        return None
    if urlsplit(where).password is not None:
        raise ConfigError(
            f"a password on the command line is visible to other users; put the URI into an environment variable, give "
            f"{_VARIABLE}ITS_NAME"
        )
    return where
