"""A cache folder for expensive results: each is made once, under a lock, and appears atomically."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from openhands_rl_plugin.core.files import locked_folder, remove_tree
from openhands_rl_plugin.environments.workspace.processes import checked

_LOOK_AGAIN = 0.1


def default_cache() -> Path:
    """``openhands_rl_plugin/swe`` in the user's folder of caches."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "openhands_rl_plugin" / "swe"


class Cache:
    """``root`` may be shared by processes, and is readable by its owner only."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()

    def path(self, *parts: str) -> Path:
        """A path in the cache; its parent folder is created."""
        place = self.root.joinpath(*parts)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)
        return place

    async def made(self, place: Path, make: Callable[[Path], Awaitable[None]]) -> None:
        """Have ``make`` fill a folder that becomes ``place``, unless that exists.

        Concurrent callers wait. A failed or killed maker leaves only its own folder, which the next one removes.
        """
        if place.exists():
            return
        async with self.locked(place):
            if place.exists():
                return
            for left in place.parent.glob(f"{place.name}.making-*"):
                await remove(left)
            making = place.with_name(f"{place.name}.making-{uuid.uuid4().hex[:8]}")
            making.mkdir(mode=0o700)
            try:
                await make(making)
                making.rename(place)
            except BaseException:
                await remove(making)
                raise

    @asynccontextmanager
    async def locked(self, place: Path) -> AsyncIterator[None]:
        """One holder at a time, over all processes; the lock ends with its process."""
        lock = self.path("locks", place.relative_to(self.root).as_posix().replace("/", "+"), "any").parent
        with ExitStack() as held:
            while True:
                with suppress(BlockingIOError):
                    held.enter_context(locked_folder(lock, wait=False))
                    break
                await asyncio.sleep(_LOOK_AGAIN)
            yield


async def remove(folder: Path) -> None:
    """Delete a folder recursively, whatever its modes."""
    await asyncio.shield(asyncio.to_thread(remove_tree, folder))


async def remove_left(runs: Path) -> None:
    """Delete the folders in ``runs`` whose names begin with the number of a process that is gone."""
    for left in runs.iterdir():
        if not Path("/proc", left.name.partition("-")[0]).exists():
            await remove(left)


async def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder with modes, times and links; by reference where the file system can."""
    await checked(["cp", "-a", "--reflink=auto", "--", str(source), str(target)], f"copy {source.name}")


async def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links."""
    await checked(["cp", "-al", "--", str(source), str(target)], f"link {source.name}")
