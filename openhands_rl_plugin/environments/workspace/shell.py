"""A session's shell and files on the host's side: starts the supervisor in a sandbox and sends it requests."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.environments.workspace.processes import in_group, make_group, remove_group
from openhands_rl_plugin.environments.workspace.sandbox import Sandbox, SandboxLimits, limited, program_for, search_path

_START_PATIENCE = 20.0
_ANSWER_PATIENCE = 15.0
_CLOSE_PATIENCE = 10.0
_MOST_ERRORS = 65536
MAX_FILE_BYTES = 10 * 1024 * 1024
"""The most bytes of a session's file that is read or edited."""
MAX_LISTED = 20_000
"""The most names of a listing."""
MOST_OUTPUT = 16_000
"""Bytes of the output of a command that judges a workspace."""
_HOST_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME")

FileKind = Literal["file", "directory", "other"]


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


class SandboxEndedError(InfrastructureError):
    """The sandbox ended, or no longer answers, while a command ran. The next command starts a new one."""


class Shell:
    """A session's shell and files: ``cd``, variables, functions and background processes last from command to command.

    ``variables``, as they are when it starts, are added to a small environment without the host's secrets. The first
    command runs in ``start``, a directory as the session sees it (default: the workspace). Thread-safe;
    one command runs at a time. Files are those that commands see: no link leads to others.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        variables: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
        *,
        start: str | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits or SandboxLimits()
        self._variables = {} if variables is None else variables
        self._start_in = start or sandbox.workspace
        self._started: _Started | None = None
        self._starting, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._closed = threading.Event()

    def run(self, command: str, *, timeout: float | None, cwd: str | None = None, keep: bool = True) -> CommandResult:
        """Run ``command`` for at most ``timeout`` seconds; then it and all processes that it started are killed.

        ``keep=False`` leaves the shell's state as it was. Raises ``InfrastructureError`` when no sandbox can be
        started and ``SandboxEndedError`` when it ended during the command.
        """
        with self._one_at_a_time:
            asked = {"command": whole_text(command), "timeout": timeout, "cwd": whole_text(cwd or ""), "keep": keep}
            patience = None if timeout is None else timeout + _ANSWER_PATIENCE
            return CommandResult(**self._running().ask("run", patience, asked))

    def ask(self, do: str, path: str | None = None, **given: object) -> Any:
        """Another request of the supervisor, which is answered while a command runs, too. A ``path`` is the session's.

        Raises ``OSError`` with the supervisor's reason, and ``InfrastructureError``.
        """
        if path is not None:
            given["path"] = os.path.join(self._sandbox.workspace, path)
        return self._running().ask(do, _ANSWER_PATIENCE, given)

    def snapshot(self) -> tuple[str, list[str]]:
        """The working directory, as ``os.fsdecode`` has it, and the names of the processes that commands left running.

        Raises ``InfrastructureError``.
        """
        found = self.ask("stand")
        return found["cwd"], found["processes"]

    def interrupt(self) -> None:
        """Send Ctrl-C (SIGINT) to the command that runs, and to what it started in the foreground."""
        self.ask("interrupt")

    def hold(self, on: bool) -> None:
        """Stop all processes of the session, or let them go on. Nothing happens without isolation, or a sandbox."""
        with suppress(InfrastructureError):
            if self._started is not None:
                self._started.ask("hold", _ANSWER_PATIENCE, {"on": on})

    def kind(self, path: str) -> FileKind | None:
        """The kind of the file, links followed; ``None`` where there is none. Raises as ``ask``, like the others."""
        return self.ask("kind", path)

    def read(self, path: str) -> bytes:
        """The whole file, of at most 10 MiB."""
        return base64.b64decode(self.ask("read", path, most=MAX_FILE_BYTES))

    def write(self, path: str, data: bytes) -> None:
        """Replace the file's content in place, or make the file and the folders above it."""
        self.ask("write", path, data=base64.b64encode(data).decode())

    def entries(self, path: str, levels: int = 1) -> list[tuple[str, FileKind]]:
        """Names below a directory, so many levels deep, with their kinds, sorted; a symbolic link counts as ``other``,
        and is not followed."""
        return [(name, kind) for name, kind in self.ask("entries", path, levels=levels, most=MAX_LISTED)]

    def path_from_host(self, path: str) -> Path:
        """The path by which this process reaches an absolute ``path`` of the session, also inside the session's mounts.

        Only in bubblewrap, and until the sandbox ends. Raises ``InfrastructureError``.
        """
        monitor = self._running().process.pid
        try:
            first_inside = Path(f"/proc/{monitor}/task/{monitor}/children").read_text().split()[0]
        except (OSError, IndexError) as error:
            raise InfrastructureError("the sandbox ended, or /proc does not show its processes") from error
        return Path(f"/proc/{first_inside}/root{path}")

    def close(self) -> None:
        """End the sandbox and everything in it, also a command that is running. Safe to call more than once."""
        self._closed.set()
        if (started := self._started) is not None:
            started.end()

    def _running(self) -> _Started:
        with self._starting:
            if self._closed.is_set():
                raise SandboxEndedError("the sandbox is closed")
            if self._started is None or self._started.process.poll() is not None:
                self._started = self._start()
            return self._started

    def _start(self) -> _Started:
        sandbox, limits = self._sandbox, self._limits
        setup = {
            "env": self._environment(),
            "cwd": sandbox.workspace,
            "start": self._start_in,
            "state": sandbox.state,
            "output_bytes": limits.output,
        }
        python, program = program_for("supervisor", setup)
        started: _Started | None = None
        try:
            started = _Started(sandbox.wrap(limited(limits, python)), make_group(limits), limits.output)
            started.send(program)
            started.answer_of(0, _START_PATIENCE)
        except (OSError, SandboxEndedError) as error:
            if started is not None:
                started.end()
            raise InfrastructureError(f"no sandbox could be started: {error}") from error
        return started

    def _environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in _HOST_VARIABLES if name in os.environ}
        quiet = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
        return {**inherited, "PATH": search_path(), **quiet, "HOME": self._sandbox.home, **self._variables}


class _Started:
    """A sandbox that was started. Threads wait for their answers side by side."""

    def __init__(self, command: Sequence[str], group: Path | None, output: int) -> None:
        # JSON may write one byte as six characters; a file comes in base 64.
        self._longest = max(6 * 2 * output, 2 * MAX_FILE_BYTES) + 65536
        self._group, self._errors = group, tempfile.TemporaryFile()  # noqa: SIM115
        self._waiting: dict[int, Future[dict[str, Any]]] = {0: Future()}
        self._numbers, self._sending, self._ending = itertools.count(1), threading.Lock(), threading.Lock()
        self._ended = ""
        self.process = subprocess.Popen(
            [*in_group(group), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"PATH": search_path()},
            start_new_session=True,
            bufsize=0,
        )
        threading.Thread(target=self._listen, name="rl-sandbox", daemon=True).start()

    def ask(self, do: str, patience: float | None, given: Mapping[str, object]) -> Any:
        """Send a request to the supervisor and return its result. Raises ``OSError`` and ``SandboxEndedError``."""
        number = next(self._numbers)
        self._waiting[number] = Future()
        self.send(json.dumps({"id": number, "do": do, **given}).encode() + b"\n")
        answer = self.answer_of(number, patience)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["reason"], given.get("path"))
        return answer["found"]

    def send(self, data: bytes) -> None:
        """Raises ``SandboxEndedError``."""
        assert self.process.stdin is not None
        try:
            with self._sending:
                pending = memoryview(data)
                while pending:
                    pending = pending[self.process.stdin.write(pending) or 0 :]
        except (OSError, ValueError) as error:
            raise SandboxEndedError(self.end()) from error

    def answer_of(self, number: int, patience: float | None) -> dict[str, Any]:
        """Raises ``SandboxEndedError``."""
        answer = self._waiting[number]
        try:
            if self._ended:
                raise SandboxEndedError(self._ended)
            return answer.result(patience)
        except TimeoutError as error:
            self.end()
            raise SandboxEndedError("the sandbox did not answer and was ended") from error
        finally:
            self._waiting.pop(number, None)

    def end(self) -> str:
        """End all of its processes; the last line of its errors."""
        with self._ending:
            if not self._ended:
                # At the end of stdin the supervisor ends all of its processes; in bubblewrap its own end does that too.
                with suppress(OSError):
                    self.process.stdin.close()  # type: ignore[union-attr]
                try:
                    self.process.wait(_CLOSE_PATIENCE)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
                self._errors.seek(0)
                lines = self._errors.read(_MOST_ERRORS).decode("utf-8", "replace").strip().splitlines()
                self._errors.close()
                self._ended = lines[-1] if lines else "the sandbox ended"
                remove_group(self._group)
        for answer in [*self._waiting.values()]:
            with suppress(InvalidStateError):
                answer.set_exception(SandboxEndedError(self._ended))
        return self._ended

    def _listen(self) -> None:
        raw: Any = self.process.stdout
        with io.BufferedReader(raw) as answers, suppress(OSError, ValueError, KeyError, TypeError):
            while line := answers.readline(self._longest):
                answer = json.loads(line)
                self._waiting[answer["id"]].set_result(answer)
        self.end()


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
    shell = Shell(sandbox, variables, limits, start=start)
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
