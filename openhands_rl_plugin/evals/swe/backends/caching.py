"""A cache folder for expensive results: each is made once, under a lock, and appears atomically."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from openhands_rl_plugin.core.files import draft_folder, locked_folder, remove_tree
from openhands_rl_plugin.environments.workspace.processes import checked

_LOOK_AGAIN = 0.1


def default_cache() -> Path:
    """``openhands_rl_plugin/swe`` in the user's folder of caches."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "openhands_rl_plugin" / "swe"


async def made(place: Path, make: Callable[[Path], Awaitable[None]]) -> None:
    """Have ``make`` fill a folder that becomes ``place``, unless that exists.

    Concurrent callers wait. A failed or killed maker leaves only its own folder, which the next one removes.
    """
    if place.exists():
        return
    lock = place.with_name(f"{place.name}.lock")
    lock.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        while True:
            with suppress(BlockingIOError):
                held.enter_context(locked_folder(lock, wait=False))
                break
            await asyncio.sleep(_LOOK_AGAIN)
        if place.exists():
            return
        for left in place.parent.glob(f"{place.name}.making-*"):
            await remove(left)
        with draft_folder(place.parent, f"{place.name}.making-") as making:
            await make(making)
            making.rename(place)


async def remove(folder: Path) -> None:
    """Delete a folder recursively, whatever its modes."""
    await asyncio.shield(asyncio.to_thread(remove_tree, folder))


async def copy_tree(source: Path, target: Path, how: str = "--reflink=auto") -> None:
    """Copy a folder with modes, times and links: by reference where the file system can, or by hard links
    (``--link``)."""
    await checked(["cp", "-a", how, "--", str(source), str(target)], f"copy {source.name}")
