"""The first process of a session's sandbox: starts a new bash for each command; all processes end with it.

The sandbox executes what this file was compiled to (``inside.supervisor_code``), so it may use the standard library and
``bounds``, which precedes it, only.
It speaks JSON lines: the first line on stdin is the set-up, every other one a request; every request gets one answer.

* Set-up: ``{"bash", "env", "cwd", "start", "state", "output_bytes", "limits": {name: bytes or count}, "bounds"}``
  (as in ``bounds``);
  commands begin in ``start``, and in ``cwd`` when their directory is gone.
* Request: ``{"command", "timeout", "cwd", "keep"}``; ``timeout`` in seconds or null; ``cwd`` and ``keep`` are for a
  command that runs in another directory and does not change the shell's state.
* Answer: ``{"output", "earlier", "exit_code", "timed_out", "cwd", "python"}``; ``earlier`` is what background processes
  of earlier commands wrote since the last answer, ``python`` the shell's program of that name.
* Request ``{"snapshot": true}``, answered ``{"cwd", "processes": [name]}``: what commands left running, and a
  directory whose characters are the bytes of its name.

A command's own output is complete when its shell has ended, because all of it is in the pipe by then; background
processes never delay an answer. The end of stdin ends the supervisor and all processes that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import sys
import time

from openhands_rl_plugin.environments.workspace.bounds import (
    KILL_PATIENCE,
    POLL,
    POLL_AFTER_KILL,
    Bounds,
    close_to_others,
    exit_code,
    family,
    kill_all,
)

# State is saved by an EXIT trap and read by the next shell, so that a shell which is killed, replaced by `exec` or
# ended by `exit` leaves the state of the command before. The command comes from a file: an argument is limited to
# 128 KiB. Its own `eval` keeps a syntax error in it from ending the script before the trap is set.
# Where a session's memory is full, the kernel ends a command, by its score, and not the supervisor.
SCRIPT = r"""
{ echo 500 > /proc/self/oom_score_adj; } 2>/dev/null
shopt -s expand_aliases
[[ -r $1 ]] && . "$1" 2>/dev/null
[[ -n $6 ]] && { __rl_drop() {
local LC_ALL=C __rl_name __rl_value __rl_total=0
for __rl_name in $(compgen -e); do
__rl_value=$__rl_name=${!__rl_name}
if (( ${#__rl_value} > 131070 || __rl_total + ${#__rl_value} > 1500000 )); then
export -n "$__rl_name"; unset -v "$__rl_name"
echo "bash: the exported variable $__rl_name was dropped: with ${#__rl_value} bytes no program could be started" >&2
else (( __rl_total += ${#__rl_value} )); fi
done; }; __rl_drop; unset -f __rl_drop; }
cd -- "$3" 2>/dev/null || { cd -- "$4" && echo "bash: $3 is gone; the working directory is $4 now" >&2; }
__rl_state=$5
[[ -n $5 ]] && trap '{ declare -p; declare -f; alias -p; umask -p; echo "#complete"; } >| "$__rl_state" 2>/dev/null
{ printf "%s\0" "$PWD"; command -v python || :; } >| "$__rl_state.cwd" 2>/dev/null' EXIT
eval "set --
$(<"$2")"
"""

CHUNK = 65536
# Programs take 128 KiB of one variable and 2 MiB of all; a shorter state holds no such variable.
LONG_STATE = 120_000


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

    def __init__(self, setup: dict, requests: int) -> None:
        self.requests = requests
        self.setup = setup
        self.state = setup["state"]
        self.cwd, self.python = setup["start"], ""
        self.selector = selectors.DefaultSelector()
        self.background = Output(setup["output_bytes"])
        self.pipe = -1
        self.output = Output(0)
        self.shell = 0
        self.status: int | None = None
        self.bounds = Bounds(setup["bounds"])
        self.watch_children()

    def watch_children(self) -> None:
        wake, wakened = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ, self.reap)
        for name, bound in self.setup["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (least, least))

    def reap(self, wake: int) -> None:
        os.read(wake, CHUNK)
        self.reap_dead()

    def reap_dead(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.shell:
                self.status = status

    def answer(self, request: dict) -> dict:
        """Execute one request and return the answer."""
        return self.snapshot() if "snapshot" in request else self.run(request)

    def snapshot(self) -> dict:
        """The state that a copy of this shell needs."""
        self.reap_dead()
        cwd = os.fsencode(self.cwd).decode("latin-1")
        return {"cwd": cwd, "processes": [name_of(pid) for pid in sorted(family(os.getpid()))]}

    def run(self, request: dict) -> dict:
        """Run one command."""
        self.selector.register(self.requests, selectors.EVENT_READ, self.host_gone)
        try:
            return self.execute(request)
        finally:
            self.selector.unregister(self.requests)

    def host_gone(self, _: int) -> None:
        # The host sends nothing while it waits for an answer, so this is the end of stdin or a broken host.
        raise SystemExit(1)

    def execute(self, request: dict) -> dict:
        keep = request["keep"]
        self.start(request["command"], request["cwd"] or self.cwd, keep)
        timeout = request["timeout"]
        deadline = None if timeout is None else time.monotonic() + timeout
        timed_out = False
        while self.status is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                timed_out = True
                self.kill_command()
                break
            if reason := self.bounds.crossed():
                self.bounds.end_all()
                self.output.tail += f"[All processes were ended: {reason}.]\n".encode()
            self.serve(POLL if left is None else min(left, POLL))
        self.finish()
        if keep and self.status is not None and not timed_out:
            self.keep_state()
        earlier, self.background = self.background.text(), Output(self.setup["output_bytes"])
        return {
            "output": self.output.text(),
            "earlier": earlier,
            "exit_code": None if timed_out or self.status is None else exit_code(self.status),
            "timed_out": timed_out,
            "cwd": os.fsencode(self.cwd).decode("utf-8", "replace"),
            "python": os.fsencode(self.python).decode("utf-8", "replace"),
        }

    def start(self, command: str, cwd: str, keep: bool) -> None:
        while (pause := self.bounds.may_start - time.monotonic()) > 0:
            self.serve(pause)
        self.bounds.begin()
        script = self.state + ".command"
        with open(script, "w", encoding="utf-8", errors="surrogateescape", opener=open_new) as file:
            file.write(command)
        self.pipe, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        self.output, self.status = Output(self.setup["output_bytes"]), None
        known = os.path.getsize(self.state) if os.path.exists(self.state) else 0
        long = "long" if known > LONG_STATE else ""
        save_to = self.state + ".new" if keep else ""
        self.shell = self.spawn(
            self.setup["bash"],
            ["bash", "-c", SCRIPT, "bash", self.state, script, cwd, self.setup["cwd"], save_to, long],
            {} if known else self.setup["env"],
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, write_end, 1),
                (os.POSIX_SPAWN_DUP2, write_end, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
        os.close(write_end)
        self.selector.register(self.pipe, selectors.EVENT_READ, self.collect)

    def spawn(self, *arguments, **options) -> int:
        """A process. Where background processes leave no room for one, all of them are ended."""
        try:
            return os.posix_spawn(*arguments, **options)
        except BlockingIOError:
            self.background.add(b"[All processes were ended: there was no room for another one.]\n")
        deadline = time.monotonic() + KILL_PATIENCE
        while True:
            self.bounds.end_all()
            self.reap_dead()
            try:
                return os.posix_spawn(*arguments, **options)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_AFTER_KILL)

    def serve(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            key.data(key.fd)

    def collect(self, pipe: int) -> bool:
        """Read the available bytes; false when there are no more for now."""
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

    def finish(self) -> None:
        """Read all output of the ended shell; later output is that of its background processes."""
        while self.pipe >= 0 and self.collect(self.pipe):
            pass
        self.pipe, self.shell = -1, 0

    def kill_command(self) -> None:
        deadline = time.monotonic() + KILL_PATIENCE
        while self.status is None and time.monotonic() < deadline:
            # The shell first: it would report the death of the others.
            kill_all([self.shell, *family(self.shell)])
            self.serve(POLL_AFTER_KILL)
        while left := family(self.shell):
            if time.monotonic() > deadline:
                # They start faster than they are found.
                self.bounds.end_all()
                break
            kill_all(left)
            self.serve(POLL_AFTER_KILL)
            self.reap_dead()

    def keep_state(self) -> None:
        new = self.state + ".new"
        try:
            with open(new, "rb", opener=open_at_once) as file:
                file.seek(-len(b"#complete\n"), os.SEEK_END)
                complete = file.read(len(b"#complete\n")) == b"#complete\n"
            with open(new + ".cwd", "rb", opener=open_at_once) as file:
                cwd, _, python = os.read(file.fileno(), CHUNK).decode("utf-8", "surrogateescape").partition("\0")
        except OSError:
            return
        if complete and cwd:
            os.replace(new, self.state)
            self.cwd, self.python = cwd, python.rstrip("\n")

    def wait_for_request(self) -> None:
        """Between requests: reap, and keep background writers from blocking."""
        self.selector.register(self.requests, selectors.EVENT_READ, None)
        try:
            while True:
                ready = self.selector.select(POLL if has_children() else None)
                if reason := self.bounds.crossed():
                    self.bounds.end_all()
                    self.background.add(f"[All processes were ended: {reason}.]\n".encode())
                for key, _ in ready:
                    if key.data is not None:
                        key.data(key.fd)
                if any(key.fd == self.requests for key, _ in ready):
                    return
        finally:
            self.selector.unregister(self.requests)


def open_new(path: str, _: int) -> int:
    """For writing. A command may have put a pipe there, at which the counting would wait for a reader."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def open_at_once(path: str, _: int) -> int:
    """For reading, without waiting at a pipe and without following a link to what has no end."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def has_children() -> bool:
    """Whether any process is left, running or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def name_of(pid: int) -> str:
    """The program's name, as ``ps`` has it; empty when the process has just ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Without a pid namespace: processes whose parent ends become ours, so that ``end_everything`` finds them."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_everything() -> None:
    deadline = time.monotonic() + KILL_PATIENCE
    while (mine := family(os.getpid())) and time.monotonic() < deadline:
        kill_all(mine)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_AFTER_KILL)


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    close_to_others()
    setup = json.loads(requests.readline())
    if not setup["bounds"]["isolated"]:
        adopt_orphans()
    os.makedirs(os.path.dirname(setup["state"]), mode=0o700, exist_ok=True)
    os.makedirs(setup["env"]["HOME"], exist_ok=True)
    supervisor = Supervisor(setup, requests.fileno())
    answers.write(b'{"ready": true}\n')
    try:
        while True:
            supervisor.wait_for_request()
            line = requests.readline()
            if not line:
                break
            answer = json.dumps(supervisor.answer(json.loads(line))).encode()
            view = memoryview(answer + b"\n")
            while view:
                view = view[answers.write(view) :]
    finally:
        end_everything()


if __name__ == "__main__":
    # Without a host, a supervisor cannot report an error to anyone.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
