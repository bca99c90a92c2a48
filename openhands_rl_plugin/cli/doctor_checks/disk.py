"""Checks of the disk: the store and the adapters, free space and permissions."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from openhands_rl_plugin.cli.doctor_checks.findings import Finding, fail, ok, warn
from openhands_rl_plugin.core.errors import RLError, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.models.adapters.store import AdapterStore

LITTLE_BYTES, TOO_LITTLE_BYTES = 2 * 1024**3, 100 * 1024**2
"""Below the first a warning: a run stores gigabytes. Below the second a failure: writes are about to fail."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


async def check_storage(folder: Path, storage: TrajectoryStorage) -> list[Finding]:
    """Whether the store can be written and read, and who else may read it."""
    findings = [_writable("storage", folder), _space("disk of the storage", folder)]
    if not folder.exists():
        return findings
    findings.append(_private("permissions of the storage", folder))
    return [*findings, await check_episodes(str(folder), storage)]


async def check_episodes(where: str, storage: TrajectoryStorage) -> Finding:
    """Read the store, a folder or a server."""
    try:
        finished = await storage.count(TrajectoryFilter())
        unfinished = await storage.count(TrajectoryFilter(finished=False))
    except RLError as error:
        return fail("stored episodes", str(error), "")
    return ok("stored episodes", f"{finished:,} and {unfinished:,} unfinished in {where}")


def check_adapters(root: Path, name: str) -> Iterator[Finding]:
    """Which version is in use, and whether its weights are intact."""
    what = f"adapter {name}"
    if not root.exists():
        yield ok(what, f"none yet: {root} will be created")
        return
    yield _writable("adapters", root)
    store = AdapterStore(root)
    try:
        current, latest = store.current(name), store.latest(name)
        if current is not None:
            store.verify(current)
    except RLError as error:
        remedy = "publish again, or remove the pointer to go back to the base model"
        yield fail(what, str(error), remedy)
        return
    if current is None:
        yield ok(what, "the base model is in use" + (f"; the newest version is {latest.name}" if latest else ""))
        return
    behind = f"; {latest.name} is newer and was not published" if latest and latest.name != current.name else ""
    yield ok(what, f"{current.name} is in use and undamaged{behind}")


def _writable(what: str, folder: Path) -> Finding:
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail(
            what, f"{place} cannot be written: {describe(error)}", "change its permissions or choose another path"
        )
    return ok(what, f"{folder} can be written" + ("" if place == folder else " (it will be created)"))


def _space(what: str, folder: Path) -> Finding:
    place = _existing(folder)
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return fail(what, f"{place} cannot be read: {describe(error)}", "check the disk")
    said = f"{free / 1024**3:,.1f} GiB free"
    remedy = "free some space, or choose another path in [rl.storage]"
    if free < TOO_LITTLE_BYTES:
        return fail(what, said, remedy)
    return warn(what, said, remedy) if free < LITTLE_BYTES else ok(what, said)


def _private(what: str, folder: Path) -> Finding:
    """The mode of the folder itself protects everything in it."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OTHERS:
        return warn(what, f"others may read {folder} ({mode:04o})", f"chmod 700 {folder}")
    return ok(what, f"private ({mode:04o})")


def _existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())
