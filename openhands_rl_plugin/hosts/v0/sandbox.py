"""Where a session's commands run: plainly as a subprocess, or in bubblewrap; and the shell that runs them.

Both kinds start the same supervisor (``supervisor.py``); they differ in what it can see. Nothing here changes the
process that it runs in: no ``chdir``, no environment variables, so that sessions of one process do not meet.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.types import Frozen

INSIDE = "/workspace"
"""Where a session finds its workspace, whichever directory that is on the host."""

_GIBIBYTE = 1024**3
_START_PATIENCE = 20.0
_ANSWER_PATIENCE = 15.0
_CLOSE_PATIENCE = 10.0
_HOST_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME")


class SandboxLimits(Frozen):
    """Bounds of a session: bytes of private memory for each process, processes, bytes of one file and of ``/tmp``,
    and bytes of one command's output that are kept (the middle goes first).

    The kernel does not apply the number of processes to root.
    """

    memory: int = Field(default=8 * _GIBIBYTE, ge=1)
    processes: int = Field(default=4096, ge=1)
    file: int = Field(default=4 * _GIBIBYTE, ge=1)
    temporary: int = Field(default=2 * _GIBIBYTE, ge=1)
    output: int = Field(default=28_000, ge=2)

    def as_rlimits(self) -> dict[str, int]:
        """By the names of the ``resource`` module."""
        return {
            "RLIMIT_DATA": self.memory,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file,
            "RLIMIT_CORE": 0,
        }


class CommandResult(BaseModel):
    """What came of a command. ``exit_code`` is ``None`` when it was killed at its time limit.

    ``earlier`` is what background processes of earlier commands wrote since the last result.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    output: str
    earlier: str = ""
    exit_code: int | None
    timed_out: bool = False
    cwd: str


class SandboxEndedError(InfrastructureError):
    """The sandbox ended, or no longer answers, while a command ran. The next command starts a new one."""


class Sandbox(Protocol):
    """How to start the supervisor, and the names by which commands and answers call the workspace."""

    workspace: str
    home: str
    state: str

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` inside."""
        ...

    def to_inside(self, text: str) -> str:
        """Host paths of the workspace in ``text`` -> ``/workspace``."""
        ...

    def from_inside(self, text: str) -> str:
        """``/workspace`` in ``text`` -> the path that a command has to use."""
        ...


class SubprocessSandbox:
    """No isolation: commands see the host with the rights of this process. ``/workspace`` is a name only, replaced
    in commands and answers (not in files), so that prompts are the same as with bubblewrap.

    Raises ``ConfigError`` for a workspace whose path a shell would have to quote.
    """

    def __init__(self, root: Path, private: Path) -> None:
        if shlex.quote(str(root)) != str(root):
            raise ConfigError(
                f"the workspace {str(root)!r} cannot be used without bubblewrap: rename it, without blanks"
            )
        self.workspace = str(root)
        self.home = str(private / "home")
        self.state = str(private / "state" / "shell")
        self._host_path = re.compile(rf"{re.escape(self.workspace)}(?![\w.-])")

    def wrap(self, command: Sequence[str]) -> list[str]:
        """``command`` as it is."""
        return list(command)

    def to_inside(self, text: str) -> str:
        """Host paths of the workspace in ``text`` -> ``/workspace``."""
        return self._host_path.sub(INSIDE, text)

    def from_inside(self, text: str) -> str:
        """``/workspace`` as a whole path component -> the host path."""
        return _INSIDE_PATH.sub(lambda _: self.workspace, text)


class BubblewrapSandbox:
    """The host's files read-only, the workspace at ``/workspace``, private ``/tmp``, processes and devices, no
    capabilities, and no network unless asked for.

    Hidden are the host's directories for temporary files, where other sessions live, and the directory that holds
    the workspace, unless the interpreter or the user's home is in it.
    """

    def __init__(self, root: Path, *, network: bool = False, temporary: int = SandboxLimits().temporary) -> None:
        self.workspace = INSIDE
        self.home = "/tmp/home"
        self.state = "/tmp/.shell/state"
        self._root = str(root)
        self._network = network
        self._temporary = temporary

    def wrap(self, command: Sequence[str]) -> list[str]:
        """``command`` behind ``bwrap`` and its mounts."""
        return [
            *("bwrap", "--unshare-all", *(("--share-net",) if self._network else ())),
            *("--cap-drop", "ALL", "--new-session", "--as-pid-1"),
            *("--tmpfs", "/", *_host_mounts(), "--dev", "/dev", "--proc", "/proc"),
            *("--size", str(self._temporary), "--tmpfs", "/tmp"),
            *self._masks(),
            *("--bind", self._root, INSIDE, "--remount-ro", "/", "--chdir", INSIDE, "--"),
            *command,
        ]

    def to_inside(self, text: str) -> str:
        """``text`` as it is: inside, the workspace has no other name."""
        return text

    def from_inside(self, text: str) -> str:
        """``text`` as it is."""
        return text

    def _masks(self) -> list[str]:
        prefixes = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)}
        hidden = [os.path.realpath(path) for path in ("/var/tmp", _temporary_directory()) if path != "/tmp"]
        parent = os.path.dirname(self._root)
        if not any(_is_within(path, parent) for path in (*prefixes, os.path.expanduser("~"))):
            hidden.append(parent)
        hidden = [path for path in hidden if os.path.isdir(path) and not _is_within(path, "/tmp")]
        mounts = [part for path in hidden for part in ("--tmpfs", path)]
        for prefix in sorted(path for path in prefixes if any(_is_within(path, mask) for mask in (*hidden, "/tmp"))):
            mounts += ["--ro-bind", prefix, prefix]
        return mounts


_INSIDE_PATH = re.compile(rf"(?<![\w./-]){INSIDE}(?![\w.-])")


def _temporary_directory() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def _is_within(path: str, directory: str) -> bool:
    return os.path.commonpath((path, directory)) == directory


def _host_mounts() -> list[str]:
    mounts: list[str] = []
    for entry in sorted(os.scandir("/"), key=lambda entry: entry.name):
        if entry.name in ("proc", "dev", "tmp", INSIDE.strip("/")):
            continue
        if entry.is_symlink():
            mounts += ["--symlink", os.readlink(entry.path), entry.path]
        else:
            mounts += ["--ro-bind-try", entry.path, entry.path]
    return mounts


@functools.cache
def check_bubblewrap() -> None:
    """Raise ``ConfigError`` unless ``bwrap`` can make a sandbox here (user namespaces may be forbidden)."""
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError(
            f"bwrap cannot make a sandbox here ({said}); allow unprivileged user namespaces, or accept commands without"
            " isolation: runtime = 'openhands_rl_plugin.hosts.v0.runtime.SubprocessRuntime'"
        ) from error


class Shell:
    """A session's shell: ``cd``, variables, functions and background processes last from command to command.

    ``variables`` are added to a small environment that does not hold the host's secrets. Thread-safe; one command
    runs at a time.
    """

    def __init__(
        self, sandbox: Sandbox, variables: Mapping[str, str] | None = None, limits: SandboxLimits | None = None
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits or SandboxLimits()
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self._closed = threading.Event()

    def run(self, command: str, *, timeout: float | None, cwd: str | None = None, keep: bool = True) -> CommandResult:
        """Run ``command`` for at most ``timeout`` seconds; then it is killed with all that it started.

        ``keep=False`` leaves the shell's state as it was. Raises ``InfrastructureError`` when no sandbox can be
        started and ``SandboxEndedError`` when it ended under the command.
        """
        with self._one_at_a_time:
            if self._closed.is_set():
                raise SandboxEndedError("the sandbox is closed")
            process = self._running()
            request = {
                "command": self._sandbox.from_inside(command),
                "timeout": timeout,
                "cwd": self._sandbox.from_inside(cwd) if cwd else None,
                "keep": keep,
            }
            patience = None if timeout is None else timeout + _ANSWER_PATIENCE
            answer = self._exchange(process, request, patience)
            try:
                result = CommandResult.model_validate_json(answer)
            except ValidationError as invalid:
                self._end(process)
                raise SandboxEndedError("the sandbox answered something else than a result") from invalid
            inside = self._sandbox.to_inside
            shown = {"output": inside(result.output), "earlier": inside(result.earlier), "cwd": inside(result.cwd)}
            return result.model_copy(update=shown)

    def close(self) -> None:
        """End the sandbox and everything in it, also a command that is running. Safe to call more than once."""
        self._closed.set()
        if (process := self._process) is not None:
            self._end(process)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                self._sandbox.wrap([sys.executable, "-I", "-S", "-c", _supervisor_source()]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise InfrastructureError(f"no sandbox could be started: {error}") from error
        try:
            self._exchange(process, self._setup(), _START_PATIENCE)
        except SandboxEndedError as error:
            raise InfrastructureError(f"no sandbox could be started: {error}") from error
        return process

    def _setup(self) -> dict[str, object]:
        sandbox = self._sandbox
        return {
            "bash": shutil.which("bash") or "/bin/bash",
            "env": self._environment(),
            "cwd": sandbox.workspace,
            "state": sandbox.state,
            "output_bytes": self._limits.output,
            "limits": self._limits.as_rlimits(),
            "subreaper": sandbox.workspace != INSIDE,
        }

    def _environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in _HOST_VARIABLES if name in os.environ}
        quiet = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
        return {"PATH": os.defpath, **inherited, **quiet, "HOME": self._sandbox.home, **self._variables}

    def _exchange(self, process: subprocess.Popen[bytes], request: object, patience: float | None) -> bytes:
        assert process.stdin is not None
        try:
            pending = memoryview(json.dumps(request).encode() + b"\n")
            while pending:
                pending = pending[process.stdin.write(pending) or 0 :]
        except (BrokenPipeError, ValueError) as error:
            raise SandboxEndedError(self._last_words(process)) from error
        return self._read_line(process, None if patience is None else time.monotonic() + patience)

    def _read_line(self, process: subprocess.Popen[bytes], deadline: float | None) -> bytes:
        assert process.stdout is not None
        line = bytearray()
        # JSON may write one byte as six characters.
        longest = 6 * 2 * self._limits.output + 65536
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            left = None if deadline is None else deadline - time.monotonic()
            if (left is not None and left <= 0) or len(line) > longest:
                self._end(process)
                raise SandboxEndedError("the sandbox did not answer and was ended")
            if not poll.poll(None if left is None else left * 1000):
                continue
            try:
                data = os.read(process.stdout.fileno(), 65536)
            except (OSError, ValueError):
                data = b""
            if not data:
                raise SandboxEndedError(self._last_words(process))
            line += data
        return bytes(line)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        self._end(process)
        said = self._said.strip().splitlines()
        return said[-1] if said else "the sandbox ended"

    _said = ""

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # Closing stdin tells the supervisor to end what it started; in bubblewrap its own end does that too.
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.close()
        try:
            process.wait(_CLOSE_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not process.stderr.closed:
            os.set_blocking(process.stderr.fileno(), False)
            self._said = (process.stderr.read() or b"").decode("utf-8", "replace")
            process.stderr.close()
            process.stdout.close()


@functools.cache
def _supervisor_source() -> str:
    return files("openhands_rl_plugin.hosts.v0").joinpath("supervisor.py").read_text(encoding="utf-8")
