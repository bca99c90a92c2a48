"""Reading a damaged store: what is readable is used, and the rest is named."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.protocols import SkipsDamage, TrajectoryStorage

if TYPE_CHECKING:
    from openhands_rl_plugin.core.records import DamagedRecord

MOST_NAMED = 20


@asynccontextmanager
async def readable(where: str, storage: TrajectoryStorage) -> AsyncIterator[TrajectoryStorage]:
    """``storage``, reading only what is readable; what is lost is told on standard error.

    Of a file store that is a temporary copy, as large as the store. Raises ``ConfigError`` for a storage that cannot.
    """
    from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

    if isinstance(storage, SkipsDamage):
        lost = storage.skip_damaged()
        try:
            yield storage
        finally:
            tell(lost)
        return
    if not isinstance(storage, FileTrajectoryStorage) or not Path(where).expanduser().is_dir():
        raise ConfigError(f"{where}: --skip-damaged works with file stores and MongoDB only")
    from openhands_rl_plugin.trajectories.sqlite.repair import ReadableStorage, repair

    with TemporaryDirectory(prefix="rl-readable-") as folder:
        async with FileTrajectoryStorage(folder, durable=False) as copy:
            lost = await repair(Path(where).expanduser(), copy)
            tell(lost)
            whole = await _opens(storage)
            if not whole and not lost:
                print(f"the first bytes of {where} are damaged; openhands-rl doctor --repair {where}", file=sys.stderr)
            yield storage if whole and not lost else ReadableStorage(storage, copy)


async def _opens(storage: TrajectoryStorage) -> bool:
    """Whether SQLite reads the file: its first bytes may be damaged, of which no record is a part."""
    try:
        await storage.count()
    except StorageError:
        return False
    return True


async def check(storage: TrajectoryStorage) -> None:
    """Raises ``DamagedError`` for a file store in which episodes may be missing without a word."""
    from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

    if isinstance(storage, FileTrajectoryStorage):
        await storage.check()


def tell(lost: Sequence[DamagedRecord]) -> None:
    """What is left out, by id, row and cause."""
    if not lost:
        return
    print(f"left out, because {len(lost)} stored record(s) cannot be read:", file=sys.stderr)
    for record in lost[:MOST_NAMED]:
        print(f"  {record.in_words()}", file=sys.stderr)
    if len(lost) > MOST_NAMED:
        print(f"  and {len(lost) - MOST_NAMED} more; openhands-rl doctor --repair lists all", file=sys.stderr)
