"""Control groups for sessions: bounds on processes and memory that the kernel keeps, for root too.

A group is made beside or below this process's own, where this user may: as root on a host, or where systemd delegated
the place to the user. Both versions of the interface are used.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "openhands-rl-"
_PATIENCE = 5.0
_CONTROLLERS = ("pids", "memory")


@dataclass(frozen=True)
class ControlGroup:
    """One group: its folders, one for each hierarchy."""

    folders: tuple[Path, ...]

    def add_family(self, pid: int) -> None:
        """Put a process, and what it has started, into the group. Raises ``OSError``."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            if pid not in self._processes():
                for folder in self.folders:
                    (folder / "cgroup.procs").write_text(str(pid))
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                self.add_family(int(child))

    def bound(self, processes: int, memory: int) -> None:
        """Set how many processes and threads, and how many bytes, its processes may have together."""
        for folder in self.folders:
            for name, most in (("pids.max", processes), ("memory.max", memory), ("memory.limit_in_bytes", memory)):
                if (folder / name).exists():
                    (folder / name).write_text(str(most))

    def remove(self) -> None:
        """Kill what is left in it, and remove it."""
        deadline = time.monotonic() + _PATIENCE
        while (pids := self._processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        _remove(self.folders)

    def _processes(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.folders[0] / "cgroup.procs").read_text().split()]
        except OSError:
            return []


def take(processes: int, memory: int) -> ControlGroup | None:
    """A group with these bounds for one session, or ``None`` where none can be made. Thread-safe."""
    try:
        return _made(places, processes, memory) if (places := _places()) else None
    except OSError:
        return None


@functools.cache
def _places() -> tuple[Path, ...]:
    """The folders in which groups can be made; empty where processes may not be put into one."""
    for places in (_unified(), _by_controller()):
        if not places:
            continue
        _remove_old(places)
        with contextlib.suppress(OSError):
            group = _made(places, 64, 2**30)
            try:
                with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
                    group.add_family(process.pid)
                return places
            finally:
                _remove(group.folders)
    return ()


def _unified() -> tuple[Path, ...]:
    """The nearest folder of version 2 whose children have both controllers."""
    mount = next((Path(place) for kind, place, _ in _mounts() if kind == "cgroup2"), None)
    own = _own_groups().get("")
    if mount is None or own is None:
        return ()
    start = Path(f"{mount}{own}")
    for folder in (start, *start.parents):
        if folder == mount.parent:
            break
        try:
            enabled = (folder / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if {*_CONTROLLERS} <= {*enabled} and os.access(folder, os.W_OK):
            return (folder,)
    return ()


def _by_controller() -> tuple[Path, ...]:
    """This process's own folders of version 1, one for each controller."""
    own, places = _own_groups(), []
    for name in _CONTROLLERS:
        mount = next((place for kind, place, options in _mounts() if kind == "cgroup" and name in options), None)
        if mount is None or name not in own:
            return ()
        # A container may name the folder by the host's path.
        folder = Path(f"{mount}{own[name]}") if Path(f"{mount}{own[name]}").is_dir() else Path(mount)
        places.append(folder)
    return tuple(dict.fromkeys(places))


def _own_groups() -> dict[str, str]:
    """This process's group by controller; by ``""`` of version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}


def _mounts() -> Iterator[tuple[str, str, list[str]]]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        yield kind, place, options.split(",")


def _made(places: tuple[Path, ...], processes: int, memory: int) -> ControlGroup:
    name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    group = ControlGroup(tuple(place / name for place in places))
    for folder in group.folders:
        folder.mkdir()
    group.bound(processes, memory)
    return group


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove_old(places: tuple[Path, ...]) -> None:
    """The groups of processes that were killed."""
    for folder in (folder for place in places for folder in place.glob(f"{_PREFIX}*")):
        if not Path("/proc", folder.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            _remove([folder])
