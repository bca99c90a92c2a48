"""What the first process of a sandbox counts: processes and memory where no control group bounds them, and the blocks
of the workspace. Who goes beyond a bound is ended.

Like ``supervisor.py``, which uses it, this file is executed in the sandbox and uses the standard library only. With a
command as arguments it runs that alone: ``python -I -S -c <text> BOUNDS COMMAND...``, where ``BOUNDS`` is JSON:
``{"processes", "memory", "disk", "folder", "grouped", "isolated"}``; a bound of 0 is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterable

POLL = 0.1
BLOCK = 512
PAGE = os.sysconf("SC_PAGE_SIZE")
SET_DUMPABLE = 4
POLL_AFTER_KILL = 0.01
KILL_PATIENCE = 5.0
# A walk through the workspace is repeated after this many times its own duration, and after so many seconds.
WALK_REST, WALK_AFTER = 20.0, 30.0
MEBIBYTE = 1024**2


def close_to_others() -> None:
    """Nobody of the same user looks into this process, its pipes or its memory."""
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)


def processes() -> dict[int, tuple[int, int, int, int]]:
    """``pid -> (parent, session, threads, resident bytes)`` of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            found[int(name)] = int(fields[1]), int(fields[3]), int(fields[17]), int(fields[21]) * PAGE
    return found


def family(root: int, table: dict[int, tuple[int, int, int, int]] | None = None) -> set[int]:
    """All descendants of ``root``, and all processes of a session that ``root`` leads."""
    table = processes() if table is None else table
    members = {pid for pid, (_, session, *_) in table.items() if session == root}
    growing = True
    while growing:
        more = {pid for pid, (parent, *_) in table.items() if parent == root or parent in members} - members
        members |= more
        growing = bool(more)
    return members - {root, os.getpid()}


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shared_memory_once(pids: Iterable[int]) -> int:
    """Bytes in memory, where what several processes share counts once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            total += 1024 * next((int(line.split()[1]) for line in file if line.startswith(b"Pss:")), 0)
    return total


class Disk:
    """How much a session has added to its workspace. Walks only when the file system lost as much, or time passed."""

    def __init__(self, folder: str, most: int) -> None:
        self.folder, self.most = folder, most
        self.allowed = most
        self.free = self.free_bytes()
        self.base: int | None = None
        self.added = 0
        self.rest = 0.0
        self.due = time.monotonic() + WALK_AFTER

    def free_bytes(self) -> int:
        # Commands may remove the folder.
        found = os.statvfs(self.folder if os.path.isdir(self.folder) else "/")
        return found.f_bfree * found.f_frsize

    def full(self) -> bool:
        """Whether more was added than is allowed. Where it was too much once, less must stay less."""
        now, free = time.monotonic(), self.free_bytes()
        lost = self.free - free
        step = max(MEBIBYTE, min(self.most // 8, self.allowed - self.added))
        if now < self.rest or (lost < step and now < self.due):
            return False
        size = walk(self.folder) + deleted_but_open()
        self.rest = time.monotonic() + WALK_REST * (time.monotonic() - now)
        self.due, self.free = now + WALK_AFTER, free
        if self.base is None:
            self.base = max(0, size - max(0, lost))
        self.added = size - self.base
        if self.added > self.allowed:
            self.allowed = self.added
            return True
        self.allowed = max(self.most, min(self.allowed, self.added))
        return False


def walk(folder: str) -> int:
    """Bytes of the blocks below ``folder``; files with several names count once."""
    total, pending, seen = 0, [folder], set()
    while pending:
        place = pending.pop()
        try:
            entries = list(os.scandir(place))
        except PermissionError:
            entries = opened(place)
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(entry.path)
                elif found.st_nlink > 1:
                    if found.st_ino in seen:
                        continue
                    seen.add(found.st_ino)
                total += found.st_blocks * BLOCK
    return total


def opened(place: str) -> list[os.DirEntry[str]]:
    """The entries of a folder that its owner closed."""
    try:
        mode = stat.S_IMODE(os.lstat(place).st_mode)
        os.chmod(place, mode | stat.S_IRWXU)
        entries = list(os.scandir(place))
        os.chmod(place, mode)
    except OSError:
        return []
    return entries


def deleted_but_open() -> int:
    """Bytes of files without a name that a process holds open."""
    total, seen = 0, set()
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(found.st_mode) and not found.st_nlink and found.st_ino not in seen:
                        seen.add(found.st_ino)
                        total += found.st_blocks * BLOCK
    return total


class Bounds:
    """Checks a session now and then, and ends what goes too far. ``isolated``: the sandbox has processes of its own."""

    def __init__(self, bounds: dict) -> None:
        self.most_processes = 0 if bounds["grouped"] else bounds["processes"]
        self.most_memory = 0 if bounds["grouped"] else bounds["memory"]
        self.isolated = bounds["isolated"]
        self.disk = Disk(bounds["folder"], bounds["disk"]) if bounds["disk"] else None
        self.next = 0.0

    def crossed(self) -> str:
        """What is beyond its bound, in words, or nothing. At most ten times a second."""
        if time.monotonic() < self.next:
            return ""
        self.next = time.monotonic() + POLL
        if self.most_processes and (reason := self.too_many()):
            return reason
        if self.disk is not None and self.disk.full():
            return f"the session added more than {self.disk.most // MEBIBYTE} MiB to its workspace"
        return ""

    def too_many(self) -> str:
        table = processes()
        mine = {*table} - {1, os.getpid()} if self.isolated else family(os.getpid(), table)
        if sum(table[pid][2] for pid in mine if pid in table) > self.most_processes:
            return f"the session has more than {self.most_processes} processes and threads"
        # Pages that processes share are counted once for each of them, which is less work.
        most = sum(table[pid][3] for pid in mine if pid in table)
        if most > self.most_memory and shared_memory_once(mine) > self.most_memory:
            return f"the session's processes use more than {self.most_memory // MEBIBYTE} MiB of memory"
        return ""

    def end_all(self) -> None:
        """End all processes but this one. In a sandbox the kernel does so at once, faster than any can fork."""
        if self.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            kill_all(family(os.getpid()))


def run_bounded(bounds: dict, command: list[str]) -> int:
    """Run one command; its exit status as a shell gives it, or 137 with a line on stderr when a bound was crossed."""
    close_to_others()
    checks = Bounds(bounds)
    child = os.posix_spawnp(command[0], command, os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        if reason := checks.crossed():
            print(f"ended: {reason}", file=sys.stderr, flush=True)
            checks.end_all()
            return 128 + signal.SIGKILL
        signal.sigtimedwait([signal.SIGCHLD], POLL)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return exit_code(ended[1])


def exit_code(status: int) -> int:
    """The exit code as a shell reports it: 128 + the signal's number for a killed process."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__" and len(sys.argv) > 2:
    sys.exit(run_bounded(json.loads(sys.argv[1]), sys.argv[2:]))
