"""Control groups for sessions: bounds on processes and memory that the kernel keeps, for root too.

A group is made beside or below this process's own, where this user may: as root on a host, or where systemd delegated
the place to the user. Both versions of the interface are used. Groups are used again, because the kernel keeps a
removed one for as long as there are cached pages of it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "openhands-rl-"
_PATIENCE = 5.0
_CONTROLLERS = ("pids", "memory")


@dataclass(frozen=True)
class ControlGroup:
    """One group: its folders, one for each hierarchy."""

    folders: tuple[Path, ...]

    def add(self, pid: int) -> None:
        """Put a process into the group, without those that it has started already. Raises ``OSError``."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def add_starting(self, pid: int) -> None:
        """``add`` and ``add_family`` for a program that starts meanwhile, or has ended. Raises ``OSError``.

        The first process in a while takes the kernel ten milliseconds, those right after it none: ``add_family`` has
        little left to do when the program has started.
        """
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self.add(pid)
            self.add_family(pid)

    def add_family(self, pid: int) -> None:
        """Put what ``pid`` has started into the group, which starts nothing meanwhile. Raises ``OSError``."""
        inside = self._processes()
        pending = _children(pid)
        while pending:
            pending += _children(child := pending.pop())
            if child not in inside:
                self.add(child)

    def end(self) -> None:
        """Kill what is left in it."""
        deadline = time.monotonic() + _PATIENCE
        while (pids := self._processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def bound(self, processes: int, memory: int) -> None:
        """Set how many processes and threads, and how many bytes, its processes may have together."""
        for folder in self.folders:
            for name, most in (("pids.max", processes), ("memory.max", memory), ("memory.limit_in_bytes", memory)):
                if (folder / name).exists():
                    (folder / name).write_text(str(most))

    def _processes(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.folders[0] / "cgroup.procs").read_text().split()]
        except OSError:
            return []


class _Groups:
    """The groups of this process that no session uses now."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free: list[ControlGroup] = []
        self._made: list[ControlGroup] = []
        self._lock = threading.Lock()

    def take(self, processes: int, memory: int) -> ControlGroup | None:
        if not (places := _places()):
            return None
        with self._lock:
            group = self._free.pop() if self._free and self._pid == os.getpid() else None
        try:
            if group is None:
                group = _made(places)
                self._made.append(group)
            group.bound(processes, memory)
        except OSError:
            return None
        return group

    def give_back(self, group: ControlGroup) -> None:
        group.end()
        with self._lock:
            self._free.append(group)

    def remove(self) -> None:
        """At the end of the process that made them; a copy of it by fork leaves them."""
        with self._lock:
            if self._pid == os.getpid():
                for group in self._made:
                    _remove(group)


_groups = _Groups()


def take(processes: int, memory: int) -> ControlGroup | None:
    """A group with these bounds for one session, or ``None`` where none can be made. Thread-safe."""
    global _groups
    if _groups._pid != os.getpid():
        _groups = _Groups()
    return _groups.take(processes, memory)


def give_back(group: ControlGroup) -> None:
    """Kill what is left in the group, for the next session. Thread-safe."""
    _groups.give_back(group)


@functools.cache
def _places() -> tuple[Path, ...]:
    """The folders in which groups can be made; empty where processes may not be put into one."""
    for places in (_unified(), _by_controller()):
        if not places:
            continue
        try:
            _remove_old(places)
            group = _made(places)
        except OSError:
            continue
        try:
            group.bound(64, 2**30)
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
                group.add(process.pid)
        except OSError:
            continue
        finally:
            _remove(group)
        atexit.register(lambda: _groups.remove())
        return places
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


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _mounts() -> Iterator[tuple[str, str, list[str]]]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        yield kind, place, options.split(",")


def _made(places: tuple[Path, ...]) -> ControlGroup:
    name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    group = ControlGroup(tuple(place / name for place in places))
    for folder in group.folders:
        folder.mkdir()
    return group


def _remove(group: ControlGroup) -> None:
    for folder in group.folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove_old(places: tuple[Path, ...]) -> None:
    """The groups of processes that were killed."""
    for place in places:
        for folder in place.glob(f"{_PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(_PREFIX).partition("-")[0]).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
