"""Who is alive: each worker holds a lock on a file of its name, and the kernel lets go of it when the worker dies.

So nobody waits for a lease to end, and a worker that is only slow or stopped keeps what it plays.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe

_FOLDER = "workers"
_SERVER = "server.lock"


@contextmanager
def living_owner(folder: Path) -> Iterator[str]:
    """A new owner of episodes, until the block or the process ends. Raises ``StorageError``."""
    name = f"worker-{uuid.uuid4().hex[:12]}"
    file = folder / _FOLDER / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {describe(error)}") from error
    try:
        yield name
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def only_server(folder: Path) -> Iterator[None]:
    """One service at a time has the queue in ``folder``. Raises ``ConfigError`` where another one has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / _SERVER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--store {folder}: {describe(error)}; choose another one") from error
    try:
        if not _taken(descriptor):
            raise ConfigError(f"--store {folder}: another rollout service has it: stop that one, or choose another one")
        yield
    finally:
        os.close(descriptor)


def release_dead(queue: JobQueue, folder: Path) -> int:
    """Let others play what dead owners had; how many episodes that were. Raises ``StorageError``."""
    return sum(queue.disown(owner) for owner in queue.owners() if _is_dead(folder / _FOLDER / owner))


def remove_dead(folder: Path) -> None:
    """Remove what killed workers have left of themselves."""
    for file in (folder / _FOLDER).glob("worker-*"):
        if _is_dead(file):
            file.unlink(missing_ok=True)


def _is_dead(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {describe(error)}") from error
    try:
        return _taken(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
