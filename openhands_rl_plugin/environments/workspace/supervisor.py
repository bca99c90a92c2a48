"""The first process of a session's sandbox: starts a new bash for each command; all processes end with it.

The sandbox executes what this file was compiled to, so it uses the standard library only. Without a sandbox it is not
process 1, and ends what it started itself.

It speaks JSON lines. Each line on stdin is a request with one answer, which is written when it is known: while a
command runs, other requests are answered.

* Set-up, which comes with the program: ``{"env", "cwd", "start", "state", "output_bytes"}``; commands begin in
  ``start``, and in ``cwd`` when their directory is gone. It is answered by ``{"id": 0}``.
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
import selectors
import signal
import stat
import sys
import time

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
SET_DUMPABLE, SET_CHILD_SUBREAPER = 4, 36


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
        head, tail = (bytes(part).decode("utf-8", "ignore") for part in (self.head, self.tail))
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
        self.code: int | None = None
        self.closed = False
        self.received: list[bytes] = []
        self.runs: dict | None = None
        self.deadline: float | None = None
        self.requests = {
            "kind": kind_at,
            "read": read,
            "write": write,
            "entries": entries,
            "stand": self.stand,
            "hold": hold,
            "interrupt": lambda: self.signal_command(signal.SIGINT),
        }
        self.selector = selectors.DefaultSelector()
        self.selector.register(given, selectors.EVENT_READ, self.receive)
        # The end of a process wakes the selector.
        wake, wakened = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ, self.reap)

    def serve_all(self) -> None:
        """Serve requests until stdin ends."""
        while not self.closed:
            left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            for key, _ in self.selector.select(left):
                key.data(key.fd)
            late = self.deadline is not None and time.monotonic() > self.deadline
            if self.runs and (self.code is not None or late):
                self.finish(self.runs)

    def reap(self, wake: int) -> None:
        os.read(wake, CHUNK)
        self.reap_dead()

    def reap_dead(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self.code = code if code >= 0 else 128 - code

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
        given = {name: value for name, value in request.items() if name not in ("id", "do")}
        if request["do"] == "run":
            self.runs = request
            # Where background processes leave no room for another one, the sandbox ends with all of them.
            return self.start(**given)
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
        """The working directory, and the names of the processes that commands left running in the sandbox."""
        self.reap_dead()
        names = []
        for pid in {*filter(str.isdigit, os.listdir("/proc"))} - {str(os.getpid())}:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", errors="replace") as file:
                names.append(file.read().strip())
        return {"cwd": self.cwd, "processes": sorted(names)}

    def signal_command(self, how: int) -> None:
        """Signal the running command and its foreground processes."""
        with contextlib.suppress(ProcessLookupError):
            if self.shell:
                os.killpg(self.shell, how)

    def start(self, command: str, timeout: float | None, cwd: str | None, keep: bool) -> None:
        script = os.memfd_create("command")
        os.pwrite(script, command.encode("utf-8", "surrogateescape"), 0)
        self.pipe, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        self.output, self.code = Output(self.setup["output_bytes"]), None
        save_to = self.state + ".new" if keep else ""
        self.shell = os.posix_spawnp(
            "bash",
            ["bash", "-c", SCRIPT, "bash", self.state, "/dev/fd/3", cwd or self.cwd, self.setup["cwd"], save_to],
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
        self.deadline = None if timeout is None else time.monotonic() + timeout

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
        timed_out = self.code is None
        if timed_out:
            self.signal_command(signal.SIGKILL)
            os.waitpid(self.shell, 0)
        while self.pipe >= 0 and self.collect(self.pipe):
            pass
        self.pipe, self.shell, self.runs, self.deadline = -1, 0, None, None
        if request["keep"] and not timed_out:
            self.keep_state()
        earlier, self.background = self.background.text(), Output(self.setup["output_bytes"])
        found = {
            "output": self.output.text(),
            "earlier": earlier,
            "exit_code": self.code,
            "timed_out": timed_out,
            "cwd": os.fsencode(self.cwd).decode("utf-8", "replace"),
            "python": os.fsencode(self.python).decode("utf-8", "replace"),
        }
        self.answer(request, found=found)

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


def entries(path: str, levels: int, most: int) -> list[tuple[str, str]]:
    """Names below a directory with their kinds, sorted; a link counts as ``other``, and is not followed."""
    found = []
    with os.scandir(path) as some:
        for entry in itertools.islice(some, max(0, most)):
            kind = kind_of(entry.stat(follow_symlinks=False).st_mode)
            found.append((entry.name, kind))
            # What is below a folder that nobody may read is not shown.
            with contextlib.suppress(OSError):
                below = entries(entry.path, levels - 1, most - len(found)) if kind == "directory" and levels > 1 else ()
                found += [(f"{entry.name}/{name}", kind) for name, kind in below]
    return sorted(found)[:most]


def hold(on: bool) -> None:
    """Stop all processes of the sandbox, or let them go on; the kernel reaches all of them at once."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpid() == 1:
            os.kill(-1, signal.SIGSTOP if on else signal.SIGCONT)


def end_everything() -> None:
    """Kill all processes, without a sandbox: orphans have become children of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def main(setup: dict) -> None:
    # Nobody of the same user looks into this process, its pipes or its memory.
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    if os.getpid() != 1:
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.makedirs(os.path.dirname(setup["state"]), mode=0o700, exist_ok=True)
    os.makedirs(setup["env"]["HOME"], exist_ok=True)
    # Without a host, a supervisor cannot report an error to anyone.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        supervisor = Supervisor(setup, os.dup(0), os.fdopen(os.dup(1), "wb"))
        supervisor.answer({"id": 0})
        supervisor.serve_all()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
    finally:
        if os.getpid() != 1:
            end_everything()
