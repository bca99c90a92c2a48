"""Control groups (version 2) for sessions: bounds on processes and memory that the kernel keeps, for root too.

A group is made beside or below this process's own, where this user may: as root, or where systemd delegated the place.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PREFIX = "openhands-rl-"
_JOIN = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
_ENDING = 5.0


def in_group(group: Path | None) -> Sequence[str]:
    """The beginning of a command line that runs in the group."""
    return () if group is None else ("sh", "-c", _JOIN, str(group))


def make_group(processes: int, memory: int) -> Path | None:
    """A group whose processes may be so many with their threads, and have so many bytes; ``None`` where none can be
    made. Thread-safe."""
    place = _place()
    with suppress(OSError):
        return None if place is None else _made(place, processes, memory)
    return None


def remove_group(group: Path | None) -> None:
    """Kill what is left in it, and remove it."""
    if group is None:
        return
    with suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + _ENDING
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.002)


@functools.cache
def _place() -> Path | None:
    """The nearest folder above this process whose groups have both bounds, and into which processes may be put."""
    try:
        mount = next(
            line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if " cgroup2 " in line
        )
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        start = Path(f"{mount}{own}")
        above = [folder for folder in (start, *start.parents) if folder.is_relative_to(mount)]
        for place in above:
            enabled = (place / "cgroup.subtree_control").read_text().split()
            if {"pids", "memory"} <= {*enabled} and os.access(place, os.W_OK):
                _remove_old(place)
                group = _made(place, 64, 2**30)
                joined = subprocess.run([*in_group(group), "true"], capture_output=True, check=False)
                remove_group(group)
                return None if joined.returncode else place
    except (OSError, StopIteration):
        pass
    return None


def _made(place: Path, processes: int, memory: int) -> Path:
    group = place / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    (group / "pids.max").write_text(str(processes))
    (group / "memory.max").write_text(str(memory))
    return group


def _remove_old(place: Path) -> None:
    """The groups of processes that were killed."""
    for group in place.glob(f"{_PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            remove_group(group)
