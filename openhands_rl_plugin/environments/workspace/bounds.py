"""What the first process of a sandbox counts: processes and memory where no control group bounds them, and the blocks
of the workspace. Who goes beyond a bound is ended.

Like ``supervisor.py``, which uses it, this file is executed in the sandbox and uses the standard library only. With a
command as arguments it runs that alone: ``python -I -S -c <text> BOUNDS COMMAND...``, where ``BOUNDS`` is JSON:
``{"processes", "memory", "disk", "folder", "also": [folder], "grouped", "isolated", "gives_way"}``; 0 is no bound.
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
WALK_REST, WALK_AFTER = 20.0, 2.0
# The same where the file system lost all that the session may still add.
WALK_REST_WHEN_FULL = 2.0
MEBIBYTE = 1024**2
# What file systems set aside for a file, however small (ext4's bytes-per-inode); memory of a file in memory.
LEAST_FILE, FILE_IN_MEMORY = 16384, 1024
IN_MEMORY = ("/tmp", "/dev/shm")
# Commands that run for longer than so many seconds, and what they leave, make way for those of others.
YOUTH, LESS_URGENT = 0.2, 10
# After a bound was crossed the next command waits for so many seconds, twice as long after each in a row.
PAUSE, LONGEST_PAUSE = 1.0, 8.0


def close_to_others() -> None:
    """Nobody of the same user looks into this process, its pipes or its memory."""
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)


Table = dict[int, tuple[int, int, int, int, int]]


def processes() -> Table:
    """``pid -> (parent, session, threads, resident bytes, group)`` of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parent, group, session = map(int, fields[1:4])
            found[int(name)] = parent, session, int(fields[17]), int(fields[21]) * PAGE, group
    return found


def how_many() -> int:
    """How many processes can be seen. Reading what each is takes as long as many new ones take to start."""
    return sum(name.isdigit() for name in os.listdir("/proc"))


def family(root: int, table: Table | None = None) -> set[int]:
    """All descendants of ``root``, and all processes of a session that ``root`` leads."""
    table = processes() if table is None else table
    members = {pid for pid, (_, session, *_) in table.items() if session == root}
    growing = True
    while growing:
        more = {pid for pid, (parent, *_) in table.items() if parent == root or parent in members} - members
        members |= more
        growing = bool(more)
    return members - {root, os.getpid()}


def kill_all(pids: Iterable[int], how: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


def shared_memory_once(pids: Iterable[int]) -> int:
    """Bytes in memory, where what several processes share counts once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            total += 1024 * next((int(line.split()[1]) for line in file if line.startswith(b"Pss:")), 0)
    return total


class Disk:
    """How much a session has added to its workspace. Walks only when the file system lost as much, or time passed."""

    def __init__(self, folders: list[str], most: int) -> None:
        self.folders, self.most = folders, most
        self.allowed = most
        self.free = self.free_bytes()
        self.base: int | None = None
        self.added = 0
        self.over = False
        self.walked = self.took = 0.0
        self.due = time.monotonic() + WALK_AFTER

    def free_bytes(self) -> tuple[int, int]:
        """What is left of the file systems: by blocks, and by files."""
        # Commands may remove the folders.
        places = {os.stat(place).st_dev: place for place in self.folders if os.path.isdir(place)}
        found = [os.statvfs(place) for place in places.values() or ("/",)]
        return sum(each.f_bfree * each.f_frsize for each in found), LEAST_FILE * sum(each.f_ffree for each in found)

    def full(self) -> bool:
        """Whether more was added than is allowed. Where it was too much once, less must stay less."""
        now, free = time.monotonic(), self.free_bytes()
        lost = max(*self.lost_since(self.free))
        left = self.allowed - self.added
        rest = self.took * (WALK_REST_WHEN_FULL if lost > left else WALK_REST)
        if now < self.walked + rest or (lost < max(MEBIBYTE, min(self.most // 8, left)) and now < self.due):
            return False
        size = self.size()
        self.walked = time.monotonic()
        self.took, self.due = self.walked - now, self.walked + WALK_AFTER
        if self.base is None:
            # With what was lost during the walk, of which the walk may have seen all.
            self.base = max(0, size - max(0, *self.lost_since(self.free)))
        self.free = free
        self.added = size - self.base
        self.over = self.added > self.allowed
        if not self.over:
            self.allowed = max(self.most, min(self.allowed, self.added))
        return self.over

    def size(self) -> int:
        return sum(map(walk, self.folders)) + deleted_but_open()

    def lost_since(self, before: tuple[int, int]) -> tuple[int, int]:
        blocks, files = self.free_bytes()
        return before[0] - blocks, before[1] - files

    def settle(self) -> None:
        """All that was ended has ended now, so what is there is allowed."""
        if self.over and self.base is not None:
            self.free = self.free_bytes()
            self.added = self.size() - self.base
            self.allowed, self.over = max(self.most, self.added), False


class FilesInMemory:
    """Files of any size take memory of the kernel's, which no process is seen to have."""

    def __init__(self, most: int) -> None:
        self.most = self.allowed = most
        self.over = False
        with open("/proc/self/mounts") as mounts:
            kinds = {fields[1]: fields[2] for fields in map(str.split, mounts)}
        self.places = [place for place in IN_MEMORY if kinds.get(place) == "tmpfs"]

    def too_many(self) -> bool:
        """Whether there are more than allowed. Where there were too many once, fewer must stay fewer."""
        used = self.used()
        self.over = used > self.allowed
        if not self.over:
            self.allowed = max(self.most, min(self.allowed, used))
        return self.over

    def used(self) -> int:
        found = [os.statvfs(place) for place in self.places]
        return FILE_IN_MEMORY * sum(each.f_files - each.f_ffree for each in found)

    def settle(self) -> None:
        """All that was ended has ended now, so what is there is allowed."""
        if self.over:
            self.allowed, self.over = max(self.most, self.used()), False


def walk(folder: str) -> int:
    """Bytes of the blocks below ``folder``, with those that small files keep from others; files with several names
    count once."""
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
                total += max(found.st_blocks * BLOCK, LEAST_FILE)
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
                        total += max(found.st_blocks * BLOCK, LEAST_FILE)
    return total


class Bounds:
    """Checks a session now and then, and ends what goes too far. ``isolated``: the sandbox has processes of its own."""

    def __init__(self, bounds: dict) -> None:
        self.most_processes = 0 if bounds["grouped"] else bounds["processes"]
        self.most_memory = 0 if bounds["grouped"] else bounds["memory"]
        self.isolated = bounds["isolated"]
        self.disk = Disk([bounds["folder"], *bounds["also"]], bounds["disk"]) if bounds["disk"] else None
        self.files = FilesInMemory(self.most_memory) if self.isolated and self.most_memory else None
        self.gives_way = bounds["gives_way"]
        self.next = self.old = self.may_start = 0.0
        self.pause = PAUSE
        self.behind: set[int] = set()

    def begin(self) -> None:
        """A command begins now."""
        now = time.monotonic()
        self.old = now + YOUTH
        if now > self.may_start + LONGEST_PAUSE:
            self.pause = PAUSE
        if self.disk is not None:
            self.disk.settle()
        if self.files is not None:
            self.files.settle()

    def crossed(self) -> str:
        """What is beyond its bound, in words, or nothing. At most ten times a second."""
        now = time.monotonic()
        if now < self.next:
            return ""
        self.next = now + POLL
        reason = self.beyond()
        if reason:
            self.may_start = now + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        elif self.gives_way and now > self.old:
            # What is started later has the urgency of who starts it.
            self.old = now + (YOUTH if self.make_way() else max(YOUTH, now - self.old))
        return reason

    def beyond(self) -> str:
        if self.most_processes and (reason := self.too_many()):
            return reason
        if self.disk is not None and self.disk.full():
            return f"the session added more than {self.disk.most // MEBIBYTE} MiB to its workspace"
        if self.files is not None and self.files.too_many():
            return f"the files in /tmp and /dev/shm take more than {self.files.most // MEBIBYTE} MiB of memory"
        return ""

    def make_way(self) -> bool:
        """Make all processes less urgent, their threads too; whether some have to be asked again."""
        table, again = processes(), False
        mine = {*table} - {1, os.getpid()} if self.isolated else family(os.getpid(), table)
        for group in {table[pid][4] for pid in mine if pid in table} - {os.getpgid(0)}:
            with contextlib.suppress(OSError):  # ended, or less urgent already
                os.setpriority(os.PRIO_PGRP, group, LESS_URGENT)
        sessions = {table[pid][1]: pid for pid in mine if pid in table}
        self.behind &= {*sessions}
        for session in {*sessions} - self.behind:
            try:
                # Where the kernel shares processors among sessions first. It takes ten such changes in a second.
                with open(f"/proc/{sessions[session]}/autogroup", "w") as file:
                    file.write(str(LESS_URGENT))
                self.behind.add(session)
            except BlockingIOError:
                again = True
            except OSError:
                self.behind.add(session)
        return again

    def too_many(self) -> str:
        too_many = f"the session has more than {self.most_processes} processes and threads"
        if self.isolated and how_many() > self.most_processes + 2:
            return too_many
        table = processes()
        mine = {*table} - {1, os.getpid()} if self.isolated else family(os.getpid(), table)
        if sum(table[pid][2] for pid in mine if pid in table) > self.most_processes:
            return too_many
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
