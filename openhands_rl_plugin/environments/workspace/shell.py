"""A session's shell on the host's side: starts the supervisor in a sandbox and sends it commands."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.environments.workspace import cgroups
from openhands_rl_plugin.environments.workspace.cgroups import ControlGroup
from openhands_rl_plugin.environments.workspace.inside import Bound, supervisor_program
from openhands_rl_plugin.environments.workspace.sandbox import (
    BubblewrapSandbox,
    Sandbox,
    SandboxLimits,
    SubprocessSandbox,
    search_path,
)
from openhands_rl_plugin.environments.workspace.supervisor import family, kill_all
from openhands_rl_plugin.environments.workspace.visible import bash

_START_PATIENCE = 20.0
_ANSWER_PATIENCE = 15.0
_CLOSE_PATIENCE = 10.0
_HOLDS = 100
MOST_OUTPUT = 16_000
"""Bytes of the output of a command that judges a workspace."""
_HOST_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME")


class CommandResult(NamedTuple):
    """The result of a command. ``exit_code`` is ``None`` when it was killed at its time limit.

    ``earlier`` is the output of earlier commands' background processes since the last result; ``python`` where the
    shell finds the program of that name, empty where it does not.
    """

    output: str
    exit_code: int | None
    cwd: str
    earlier: str = ""
    timed_out: bool = False
    python: str = ""


class ShellSnapshot(NamedTuple):
    """The state of a shell: its working directory, as ``os.fsdecode`` has it, and the names of the processes that
    commands left running.
    """

    cwd: str
    processes: list[str]


class SandboxEndedError(InfrastructureError):
    """The sandbox ended, or no longer answers, while a command ran. The next command starts a new one."""


class Shell:
    """A session's shell: ``cd``, variables, functions and background processes last from command to command.

    ``variables``, as they are when it starts, are added to a small environment without the host's secrets. The first
    command runs in ``start``, a directory as the session sees it (default: the workspace). ``gives_way``: a command
    that takes longer is less urgent than those of others. Thread-safe; one command runs at a time.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        variables: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
        *,
        start: str | None = None,
        gives_way: bool = True,
    ) -> None:
        self._gives_way = gives_way
        self._sandbox = sandbox
        self._limits = limits or SandboxLimits()
        self._variables = {} if variables is None else variables
        self._start_in = sandbox.from_inside(start) if start else sandbox.workspace
        self._process: subprocess.Popen[bytes] | None = None
        self._group: ControlGroup | None = None
        self._one_at_a_time = threading.Lock()
        self._closed = threading.Event()

    def run(self, command: str, *, timeout: float | None, cwd: str | None = None, keep: bool = True) -> CommandResult:
        """Run ``command`` for at most ``timeout`` seconds; then it and all processes that it started are killed.

        ``keep=False`` leaves the shell's state as it was. Raises ``InfrastructureError`` when no sandbox can be
        started and ``SandboxEndedError`` when it ended during the command.
        """
        with self._one_at_a_time:
            process = self._running()
            request = {
                "command": self._sandbox.from_inside(whole_text(command)),
                "timeout": timeout,
                "cwd": self._sandbox.from_inside(whole_text(cwd)) if cwd else None,
                "keep": keep,
            }
            patience = None if timeout is None else timeout + _ANSWER_PATIENCE
            answer = self._ask(process, request, patience)
            shown = {name: self._sandbox.to_inside(answer[name]) for name in ("output", "earlier", "cwd", "python")}
            return CommandResult(exit_code=answer["exit_code"], timed_out=answer["timed_out"], **shown)

    def snapshot(self) -> ShellSnapshot:
        """The state of the shell. Raises ``InfrastructureError``."""
        with self._one_at_a_time:
            return ShellSnapshot(**self._ask(self._running(), {"snapshot": True}, _ANSWER_PATIENCE))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block nothing of the session runs: its processes are stopped, or all ended where they start faster
        than they are found. Not where commands run without isolation: what left the shell's family goes on."""
        stopped: set[int] = set()
        if (process := self._process) is not None and process.poll() is None:
            with suppress(InfrastructureError):
                isolated = isinstance(self._sandbox, BubblewrapSandbox)
                first = int(self.path_from_host("/").parts[2]) if isolated else process.pid
                for _ in range(_HOLDS):
                    if not (running := family(first) - stopped):
                        break
                    kill_all(running, signal.SIGSTOP)
                    stopped |= running
                else:
                    self._end(process)
        try:
            yield
        finally:
            kill_all(stopped, signal.SIGCONT)

    def path_from_host(self, path: str) -> Path:
        """The path by which this process reaches an absolute ``path`` of the session, also inside the session's mounts.

        Only in bubblewrap, and until the sandbox ends. Raises ``InfrastructureError``.
        """
        monitor = self._running().pid
        try:
            first_inside = Path(f"/proc/{monitor}/task/{monitor}/children").read_text().split()[0]
        except (OSError, IndexError) as error:
            raise InfrastructureError("the sandbox ended, or /proc does not show its processes") from error
        return Path(f"/proc/{first_inside}/root{path}")

    def close(self) -> None:
        """End the sandbox and everything in it, also a command that is running. Safe to call more than once."""
        self._closed.set()
        if (process := self._process) is not None:
            self._end(process)
            self._process = None

    def _ask(self, process: subprocess.Popen[bytes], request: object, patience: float | None) -> dict[str, Any]:
        self._send(process, _line(request))
        line = self._read_line(process, None if patience is None else time.monotonic() + patience)
        try:
            return json.loads(line)
        except ValueError as invalid:
            self._end(process)
            raise SandboxEndedError("the sandbox answered something else than a result") from invalid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed.is_set():
            raise SandboxEndedError("the sandbox is closed")
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        program, code = supervisor_program()
        # Its real place: a virtual environment may be reached by a link that is hidden.
        command = self._sandbox.wrap([os.path.realpath(sys.executable), "-I", "-S", "-c", program])
        group = self._group = cgroups.take(self._limits.processes, self._limits.memory)
        process: subprocess.Popen[bytes] | None = None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
                bufsize=0,
            )
            self._send(process, code + _line(self._setup()))
            if group is not None:
                # The first process in a while takes the kernel ten milliseconds, during which the program starts.
                group.add_family(process.pid)
            self._read_line(process, time.monotonic() + _START_PATIENCE)
            if group is not None:
                group.add_family(process.pid)
        except (OSError, SandboxEndedError) as error:
            self._end(process)
            raise InfrastructureError(f"no sandbox could be started: {error}") from error
        return process

    def _setup(self) -> dict[str, object]:
        sandbox, limits = self._sandbox, self._limits
        return {
            "bash": bash(),
            "env": self._environment(),
            "cwd": sandbox.workspace,
            "start": self._start_in,
            "state": sandbox.state,
            "output_bytes": self._limits.output,
            "limits": self._limits.as_rlimits(),
            "bounds": Bound(
                processes=limits.processes,
                memory=limits.memory,
                disk=limits.disk,
                folder=sandbox.workspace,
                also=sandbox.writable,
                grouped=self._group is not None,
                isolated=not isinstance(sandbox, SubprocessSandbox),
                gives_way=self._gives_way,
            ).model_dump(mode="json"),
        }

    def _environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in _HOST_VARIABLES if name in os.environ}
        quiet = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
        return {**inherited, "PATH": search_path(), **quiet, "HOME": self._sandbox.home, **self._variables}

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        try:
            pending = memoryview(data)
            while pending:
                pending = pending[process.stdin.write(pending) or 0 :]
        except (BrokenPipeError, ValueError) as error:
            raise SandboxEndedError(self._last_words(process)) from error

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
        printed = self._printed.strip().splitlines()
        return printed[-1] if printed else "the sandbox ended"

    _printed = ""

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            # Closing stdin makes the supervisor end all its processes; in bubblewrap its own end does that too.
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.close()
            try:
                process.wait(_CLOSE_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if not process.stderr.closed:
                os.set_blocking(process.stderr.fileno(), False)
                self._printed = (process.stderr.read() or b"").decode("utf-8", "replace")
                process.stderr.close()
                process.stdout.close()
        group, self._group = self._group, None
        if group is not None:
            group.remove()


def _line(request: object) -> bytes:
    return json.dumps(request).encode() + b"\n"


def check_workspace(
    asked: WorkspaceCommand,
    sandbox: Sandbox,
    variables: Mapping[str, str],
    limits: SandboxLimits,
    *,
    start: str | None = None,
) -> CommandEvidence:
    """Run the command in a shell of its own: no alias, variable or file in ``/tmp`` of the session has a say. Blocks.

    ``start``: where it begins, as the session sees it (default: the workspace). Its output is cut to 16,000 bytes.
    """
    limits = limits.model_copy(update={"output": MOST_OUTPUT})
    # Its time limit is part of what it measures.
    shell = Shell(sandbox, variables, limits, start=start, gives_way=False)
    began = 0.0
    try:
        shell.run(":", timeout=20.0)
        began = time.monotonic()
        result = shell.run(asked.command, timeout=asked.timeout)
        did = {"exit_code": result.exit_code, "timed_out": result.timed_out, "output": result.output}
    except InfrastructureError as error:
        # Who ends a sandbox that worked is the command, with the code that it runs.
        did = {"prevented" if began and isinstance(error, SandboxEndedError) else "error": str(error)}
    finally:
        shell.close()
    return asked.did(**did, seconds=round(time.monotonic() - began, 3) if began else 0.0)
