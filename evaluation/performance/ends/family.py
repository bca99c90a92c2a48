"""Everything that was started by this process and by what it started, also when those in between have ended."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on processes whose parent ends become children of this one, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[int]:
    """The processes below this one that have not ended."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found, at = set[int](), [os.getpid()]
    while at:
        above = at.pop()
        at += (below := [pid for pid, parent in parents.items() if parent == above])
        found.update(below)
    return found


def reap(*others: int) -> None:
    """Collect adopted processes that have ended; ``others`` are collected by who started them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ChildProcessError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            pid = int(stat.parent.name)
            if state == "Z" and int(parent) == os.getpid() and pid not in others:
                os.waitpid(pid, os.WNOHANG)


def end(pid: int) -> str:
    """End a process that should not be there any more; its command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {command}"
