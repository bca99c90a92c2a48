"""The first process of a session's sandbox: starts a new bash for each command; all processes end with it.

The sandbox executes what this file was compiled to, so it uses the standard library only. With a command as arguments
it runs that alone, within bounds: ``python -I -S -c <text> BOUNDS COMMAND...``. ``BOUNDS`` is JSON:
``{"processes", "memory", "disk", "folders", "limits": {name: number}, "grouped", "isolated"}``, which
``SandboxLimits.counted`` makes; ``limits`` are named as in ``resource``.

Else it speaks JSON lines. The first line on stdin is the set-up, every other one a request. Each has one answer, which
is written when it is known: while a command runs, other requests are answered.

* Set-up: ``{"bash", "env", "cwd", "start", "state", "output_bytes", "bounds"}``;
  commands begin in ``start``, and in ``cwd`` when their directory is gone. It is answered by ``{"id": 0}``.
* Request: ``{"id", "do", ...}``, answered by ``{"id", "found"}`` or ``{"id", "errno", "reason"}``. ``do`` is ``run`` or
  one of ``Supervisor.requests``.
* ``run``: ``{"command", "timeout", "cwd", "keep"}``, one at a time; ``timeout``: seconds or null. ``cwd`` and ``keep``
  are for a command in another directory that does not change the shell's state. It finds ``{"output", "earlier",
  "exit_code", "timed_out", "cwd", "python"}``; ``earlier`` is what background processes of earlier commands wrote since
  the last answer, ``python`` the shell's program of that name.

A command's own output is complete when its shell has ended, because all of it is in the pipe by then; background
processes never delay an answer. The end of stdin ends the supervisor and all processes that it started.
"""

from __future__ import annotations

import binascii
import contextlib
import ctypes
import errno
import io
import itertools
import json
import os
import resource
import selectors
import signal
import stat
import sys
import time
from collections.abc import Iterable

# State is saved by an EXIT trap and read by the next shell, so that a shell which is killed, replaced by `exec` or
# ended by `exit` leaves the state of the command before. The command comes from a file: an argument is limited to
# 128 KiB. Its own `eval` keeps a syntax error in it from ending the script before the trap is set.
# Where a session's memory is full, the kernel ends a command, by its score, and not the supervisor.
SCRIPT = r"""
{ echo 500 > /proc/self/oom_score_adj; } 2>/dev/null
shopt -s expand_aliases
[[ -r $1 ]] && . "$1" 2>/dev/null
cd -- "$3" 2>/dev/null || { cd -- "$4" && echo "bash: $3 is gone; the working directory is $4 now" >&2; }
__rl_state=$5
[[ -n $5 ]] && trap '{ declare -p; declare -f; alias -p; umask -p; echo "#complete"; } >| "$__rl_state" 2>/dev/null
{ printf "%s\0" "$PWD"; command -v python || :; } >| "$__rl_state.cwd" 2>/dev/null' EXIT
eval "exec 3<&-; set --
$(<"$2")"
"""

CHUNK = 65536
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
# What file systems set aside for a file, however small (ext4's bytes-per-inode).
LEAST_FILE = 16384
# After a bound was crossed the next command waits for so many seconds.
PAUSE = 2.0


def close_to_others() -> None:
    """Nobody of the same user looks into this process, its pipes or its memory."""
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)


Table = dict[int, tuple[int, int, int, int, str]]


def processes() -> Table:
    """``pid -> (parent, session, threads, resident bytes, name)`` of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    before, _, after = file.read().rpartition(b")")
            except OSError:
                continue
            fields, called = after.split(), before.partition(b"(")[2].decode("utf-8", "replace")
            found[int(name)] = int(fields[1]), int(fields[3]), int(fields[17]), int(fields[21]) * PAGE, called
    return found


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


def proportional_memory(pids: Iterable[int]) -> int:
    """Bytes in memory; a page that several processes share counts once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            total += 1024 * next((int(line.split()[1]) for line in file if line.startswith(b"Pss:")), 0)
    return total


class Disk:
    """How much was added to folders. Once it was too much, commands may only make it less.

    They are walked when the file system lost as much as is left, or time passed.
    """

    def __init__(self, folders: list[str], most: int) -> None:
        self.folders = folders
        self.most = self.allowed = most
        self.over = False
        self.free = self.free_bytes()
        self.base: int | None = None
        self.added = 0
        self.next, self.due = 0.0, time.monotonic() + WALK_AFTER

    def crossed(self) -> bool:
        now = time.monotonic()
        if now < (self.next if self.lost() > self.allowed - self.added else self.due):
            return False
        self.over = self.size() > self.allowed
        if not self.over:
            self.allowed = max(self.most, min(self.allowed, self.added))
        took = time.monotonic() - now
        self.next = now + took * WALK_REST_WHEN_FULL
        self.due = now + max(WALK_AFTER, took * WALK_REST)
        return self.over

    def settle(self) -> None:
        """A command begins after all others were ended: what is there is allowed."""
        if self.over:
            self.allowed, self.over = max(self.most, self.size()), False

    def size(self) -> int:
        free, found = self.free_bytes(), sum(map(walk, self.folders))
        if self.base is None:
            # What was lost before and during the first walk was added.
            self.base = max(0, found - max(0, self.lost()))
        self.free, self.added = free, found - self.base
        return self.added

    def lost(self) -> int:
        return max(before - now for before, now in zip(self.free, self.free_bytes(), strict=True))

    def free_bytes(self) -> tuple[int, int]:
        """What is left of the file systems: by blocks, and by files."""
        # Commands may remove the folders.
        places = {os.stat(place).st_dev: place for place in self.folders if os.path.isdir(place)}
        found = [os.statvfs(place) for place in places.values() or ("/",)]
        return sum(each.f_bfree * each.f_frsize for each in found), LEAST_FILE * sum(each.f_ffree for each in found)


def walk(folder: str) -> int:
    """Bytes of the blocks below ``folder``, at least those that a file system sets aside for each file; files with
    several names count once."""
    total, pending, seen = 0, [folder], set()
    while pending:
        with contextlib.suppress(OSError):
            for entry in os.scandir(pending.pop()):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        pending.append(entry.path)
                    if found.st_nlink == 1 or found.st_ino not in seen:
                        seen.add(found.st_ino)
                        total += max(found.st_blocks * BLOCK, LEAST_FILE)
    return total


class Bounds:
    """Checks a session ten times a second, and ends what goes too far."""

    def __init__(self, bounds: dict) -> None:
        self.most_processes = 0 if bounds["grouped"] else bounds["processes"]
        self.most_memory = 0 if bounds["grouped"] else bounds["memory"]
        self.isolated = bounds["isolated"]
        self.disk = Disk(bounds["folders"], bounds["disk"]) if bounds["folders"] else None
        self.next = self.may_start = 0.0
        for name, bound in bounds["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (least, least))

    def begin(self) -> None:
        """A command begins now."""
        if self.disk:
            self.disk.settle()

    def crossed(self) -> str:
        """What is beyond its bound, in words, or nothing."""
        now = time.monotonic()
        if now < self.next:
            return ""
        self.next = now + POLL
        reason = self.beyond()
        if reason:
            self.may_start = now + PAUSE
        return reason

    def beyond(self) -> str:
        if self.most_processes and (reason := self.too_many()):
            return reason
        if self.disk and self.disk.crossed():
            return f"the session added more than {self.disk.most // MEBIBYTE} MiB to its workspace"
        return ""

    def too_many(self) -> str:
        too_many = f"the session has more than {self.most_processes} processes and threads"
        # Reading what each process is takes as long as many new ones take to start.
        if self.isolated and sum(name.isdigit() for name in os.listdir("/proc")) > self.most_processes + 2:
            return too_many
        table = processes()
        mine = {*table} - {1, os.getpid()} if self.isolated else family(os.getpid(), table) & {*table}
        if sum(table[pid][2] for pid in mine) > self.most_processes:
            return too_many
        # Pages that processes share are counted once for each of them, which is less work.
        most = sum(table[pid][3] for pid in mine)
        if most > self.most_memory and proportional_memory(mine) > self.most_memory:
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


class Output:
    """The first and the last bytes of a stream; the bytes between that do not fit are counted and dropped."""

    def __init__(self, bound: int) -> None:
        self.half = bound // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = 0

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if (excess := len(self.tail) - self.half) > 0:
            self.cut += excess
            del self.tail[:excess]

    def text(self) -> str:
        if not self.cut:
            return bytes(self.head + self.tail).decode("utf-8", "replace")
        # A character that was cut in two is dropped.
        head = bytes(self.head).decode("utf-8", "ignore")
        tail = bytes(self.tail).decode("utf-8", "ignore")
        return f"{head}\n[... {self.cut} bytes of output cut ...]\n{tail}"


class Supervisor:
    """One command at a time; background processes live on until the end of stdin."""

    def __init__(self, setup: dict, given: int, answers: io.BufferedWriter) -> None:
        self.setup, self.answers = setup, answers
        self.state = setup["state"]
        self.cwd, self.python = setup["start"], ""
        self.background = Output(setup["output_bytes"])
        self.output = Output(0)
        self.pipe, self.shell = -1, 0
        self.status: int | None = None
        self.bounds = Bounds(setup["bounds"])
        self.closed = False
        self.received: list[bytes] = []
        self.waits: dict | None = None
        self.runs: dict | None = None
        self.deadline = float("inf")
        self.requests = {
            "kind": kind_at,
            "read": read,
            "write": write,
            "entries": entries,
            "files": files_below,
            "stand": self.stand,
            "hold": self.hold,
            "interrupt": self.interrupt,
        }
        self.selector = selectors.DefaultSelector()
        self.selector.register(given, selectors.EVENT_READ, self.receive)
        self.watch_children()

    def watch_children(self) -> None:
        wake, wakened = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ, self.reap)

    def serve_all(self) -> None:
        """Until the end of stdin."""
        while not self.closed:
            if self.waits and time.monotonic() >= self.bounds.may_start:
                self.runs, self.waits = self.waits, None
                self.start(self.runs)
            left = max(0.0, self.deadline - time.monotonic())
            self.serve(min(left, POLL) if self.runs or self.waits or has_children() else None)
            if not self.waits and (reason := self.bounds.crossed()):
                self.bounds.end_all()
                sink = self.output if self.runs else self.background
                sink.add(f"[All processes were ended: {reason}.]\n".encode())
            if self.runs and (self.status is not None or time.monotonic() > self.deadline):
                self.finish(self.runs)

    def serve(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            key.data(key.fd)

    def reap(self, wake: int) -> None:
        os.read(wake, CHUNK)
        self.reap_dead()

    def reap_dead(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell:
                    self.status = ended[1]

    def receive(self, given: int) -> None:
        data = os.read(given, CHUNK)
        self.closed = not data
        self.received.append(data)
        if b"\n" in data:
            *lines, rest = b"".join(self.received).split(b"\n")
            self.received = [rest]
            for line in lines:
                self.attend(json.loads(line))

    def attend(self, request: dict) -> None:
        if request["do"] == "run":
            self.waits = request
            return
        given = {name: value for name, value in request.items() if name not in ("id", "do")}
        try:
            self.answer(request, found=self.requests[request["do"]](**given))
        except OSError as error:
            self.answer(request, errno=error.errno, reason=error.strerror)
        except ValueError:
            self.answer(request, errno=errno.EINVAL, reason="no name of a file")

    def answer(self, request: dict, **about: object) -> None:
        self.answers.write(json.dumps({"id": request["id"], **about}).encode() + b"\n")
        self.answers.flush()

    def stand(self) -> dict:
        """The working directory, and the names of the processes that commands left running."""
        self.reap_dead()
        table = processes()
        return {"cwd": self.cwd, "processes": [table[pid][4] for pid in sorted(family(os.getpid(), table))]}

    def hold(self, on: bool) -> None:
        """Stop all processes of the session, or let them go on. In a sandbox the kernel reaches all of them at once."""
        how = signal.SIGSTOP if on else signal.SIGCONT
        kill_all([-1] if self.bounds.isolated else family(os.getpid()), how)

    def interrupt(self) -> None:
        """Ctrl-C for the command that runs, and for what it started in the foreground."""
        kill_all((pid for pid, (_, session, *_) in processes().items() if session == self.shell), signal.SIGINT)

    def start(self, request: dict) -> None:
        self.bounds.begin()
        script = os.memfd_create("command")
        os.pwrite(script, request["command"].encode("utf-8", "surrogateescape"), 0)
        self.pipe, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        self.output, self.status = Output(self.setup["output_bytes"]), None
        save_to = self.state + ".new" if request["keep"] else ""
        cwd = request["cwd"] or self.cwd
        self.shell = self.spawn(
            self.setup["bash"],
            ["bash", "-c", SCRIPT, "bash", self.state, "/dev/fd/3", cwd, self.setup["cwd"], save_to],
            {} if os.path.exists(self.state) else self.setup["env"],
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, write_end, 1),
                (os.POSIX_SPAWN_DUP2, write_end, 2),
                (os.POSIX_SPAWN_DUP2, script, 3),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
        os.close(write_end)
        os.close(script)
        self.selector.register(self.pipe, selectors.EVENT_READ, self.collect)
        self.deadline = float("inf") if request["timeout"] is None else time.monotonic() + request["timeout"]

    def spawn(self, *arguments, **options) -> int:
        """A process. Where background processes leave no room for one, all of them are ended."""
        deadline = time.monotonic() + KILL_PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                return os.posix_spawn(*arguments, **options)
            self.background.add(b"[All processes were ended: there was no room for another one.]\n")
            self.bounds.end_all()
            time.sleep(POLL_AFTER_KILL)
            self.reap_dead()
        sys.exit("no process could be started")

    def collect(self, pipe: int) -> bool:
        """Read the available bytes; false when the pipe is empty."""
        sink = self.output if pipe == self.pipe else self.background
        try:
            data = os.read(pipe, CHUNK)
        except BlockingIOError:
            return False
        if data:
            sink.add(data)
            return True
        self.selector.unregister(pipe)
        os.close(pipe)
        if pipe == self.pipe:
            self.pipe = -1
        return False

    def finish(self, request: dict) -> None:
        """Answer for the command, which has ended or is ended now. Later output is that of its background processes."""
        timed_out = self.status is None
        if timed_out:
            self.kill_command()
        while self.pipe >= 0 and self.collect(self.pipe):
            pass
        self.pipe, self.shell, self.runs, self.deadline = -1, 0, None, float("inf")
        if request["keep"] and not timed_out:
            self.keep_state()
        earlier, self.background = self.background.text(), Output(self.setup["output_bytes"])
        found = {
            "output": self.output.text(),
            "earlier": earlier,
            "exit_code": None if timed_out or self.status is None else exit_code(self.status),
            "timed_out": timed_out,
            "cwd": os.fsencode(self.cwd).decode("utf-8", "replace"),
            "python": os.fsencode(self.python).decode("utf-8", "replace"),
        }
        self.answer(request, found=found)

    def kill_command(self) -> None:
        deadline = time.monotonic() + KILL_PATIENCE
        while self.status is None or family(self.shell):
            if time.monotonic() > deadline:
                # They start faster than they are found.
                self.bounds.end_all()
                break
            # The shell first: it would report the death of the others.
            kill_all([*([self.shell] if self.status is None else []), *family(self.shell)])
            self.serve(POLL_AFTER_KILL)
            self.reap_dead()

    def keep_state(self) -> None:
        new, end = self.state + ".new", b"#complete\n"
        try:
            # A command may have put a link, or a pipe at which this would wait, in the place of these files.
            with os.fdopen(opened(new, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                file.seek(-len(end), os.SEEK_END)
                complete = file.read(len(end)) == end
            with os.fdopen(opened(new + ".cwd", os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                cwd, _, python = file.read(CHUNK).decode("utf-8", "surrogateescape").partition("\0")
        except OSError:
            return
        if complete and cwd:
            os.replace(new, self.state)
            self.cwd, self.python = cwd, python.rstrip("\n")


def opened(path: str, flags: int) -> int:
    """A regular file, open. Nothing waits at a pipe."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def kind_of(mode: int) -> str:
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def kind_at(path: str) -> str | None:
    """The kind of the file, links followed; nothing where there is none."""
    try:
        return kind_of(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: str, most: int) -> str:
    """The whole file, in base 64."""
    with os.fdopen(opened(path, os.O_RDONLY), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB")
    return binascii.b2a_base64(data, newline=False).decode()


def write(path: str, data: str) -> None:
    """Replace the file's content in place, or make the file and the folders above it."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with os.fdopen(opened(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate()
        file.write(binascii.a2b_base64(data))


def entries(path: str, most: int) -> list[tuple[str, str]]:
    """Names in a directory with their kinds, sorted; a link counts as ``other``."""
    with os.scandir(path) as found:
        some = itertools.islice(found, most)
        return sorted((entry.name, kind_of(entry.stat(follow_symlinks=False).st_mode)) for entry in some)


def files_below(path: str, most: int) -> list[str]:
    """Regular files below a directory, relative to it; links are not followed."""
    os.stat(path)
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    some = itertools.islice(found, most)
    return [os.path.relpath(each, path) for each in some if stat.S_ISREG(os.lstat(each).st_mode)]


def has_children() -> bool:
    """Whether any process is left, running or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def adopt_orphans() -> None:
    """Without a pid namespace: processes whose parent ends become ours, so that ``end_everything`` finds them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_everything() -> None:
    deadline = time.monotonic() + KILL_PATIENCE
    while (mine := family(os.getpid())) and time.monotonic() < deadline:
        kill_all(mine)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_AFTER_KILL)


def main() -> None:
    given = os.dup(0)
    close_to_others()
    # The host waits for an answer to the set-up, so that nothing else is read with it.
    with os.fdopen(given, "rb", closefd=False) as first:
        setup = json.loads(first.readline())
    if not setup["bounds"]["isolated"]:
        adopt_orphans()
    os.makedirs(os.path.dirname(setup["state"]), mode=0o700, exist_ok=True)
    os.makedirs(setup["env"]["HOME"], exist_ok=True)
    supervisor = Supervisor(setup, given, os.fdopen(os.dup(1), "wb"))
    try:
        supervisor.answer({"id": 0})
        supervisor.serve_all()
    finally:
        end_everything()


if __name__ == "__main__" and len(sys.argv) > 2:
    sys.exit(run_bounded(json.loads(sys.argv[1]), sys.argv[2:]))
elif __name__ == "__main__":
    # Without a host, a supervisor cannot report an error to anyone.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
