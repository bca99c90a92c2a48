"""The SDK's terminal on a sandboxed workspace: its shell loses no output, needs no terminal program, can be forked.

Commands run without a terminal, with an empty standard input. One that reaches its time limit goes on; until it has
ended, an empty command waits for it and ``C-c`` interrupts it, as with the SDK's own. Its output comes when it ends.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Protocol

from openhands.sdk.utils import maybe_truncate
from openhands.tools.terminal.constants import MAX_CMD_OUTPUT_SIZE, TIMEOUT_MESSAGE_TEMPLATE
from openhands.tools.terminal.definition import TerminalAction, TerminalObservation
from openhands.tools.terminal.metadata import CmdOutputMetadata

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError

DEFAULT_SECONDS = 30.0
"""A command's time limit where neither the model nor the tool's parameters say one: as the SDK's for silence."""

_RESET = "Terminal session has been reset. All previous environment variables and session state have been cleared."
_ENDED = "[The sandbox ended and a new one is started: background processes and the shell's state are lost.]"
_NO_INPUT = (
    "was not sent: the running command has no terminal and an empty standard input. Send C-c to interrupt it, or an "
    "empty command to wait for it"
)
_INTERRUPT = "C-c"
# Seconds for an interrupted command to end.
_INTERRUPTED = 5.0


class HasShell(Protocol):
    """A workspace with a shell; ``start`` is the directory that it begins in. All methods block."""

    start: str

    def run(self, command: str, *, timeout: float | None) -> CommandResult:
        """Run a command to its end. Raises ``InfrastructureError``."""
        ...

    def interrupt(self) -> None:
        """Send Ctrl-C to the command that is running."""
        ...

    def restart(self) -> None:
        """End all processes, and go on with a new shell."""
        ...


class Terminal:
    """One session's terminal: a shell, and the command that runs in it. ``seconds``: the time limit by default."""

    def __init__(self, workspace: HasShell, seconds: float = DEFAULT_SECONDS) -> None:
        self.seconds = seconds
        self._workspace = workspace
        self._running: tuple[str, Future[CommandResult]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a command is still running."""
        return self._running is not None

    def forked(self, workspace: HasShell) -> Terminal:
        """A terminal in a fork, in which nothing runs."""
        return Terminal(workspace, self.seconds)

    def export(self, variables: Mapping[str, str]) -> None:
        """Set variables of the shell, unless a command is running."""
        if self._running is None and variables:
            exports = [f"export {name}={shlex.quote(text)}" for name, text in variables.items() if name.isidentifier()]
            self._workspace.run("\n".join(exports), timeout=DEFAULT_SECONDS)

    def execute(self, action: TerminalAction) -> TerminalObservation:
        """Run a command, or attend to the one that is running."""
        command = action.command.strip()
        if action.reset and action.is_input:
            raise ValueError("Cannot use reset=True with is_input=True")
        if action.reset:
            return self._reset(command, action.timeout)
        seconds = self.seconds if action.timeout is None else action.timeout
        if "\0" in command:
            return _refused(command, "A command cannot hold a null character.")
        if self._running is None:
            if not command or action.is_input:
                what = "interact with" if action.is_input else "retrieve logs from"
                return _refused(command, f"No previous running command to {what}.")
            self._start(command)
        elif action.is_input and command == _INTERRUPT:
            self._workspace.interrupt()
            seconds = _INTERRUPTED if action.timeout is None else seconds
        elif action.is_input and command:
            return _refused(command, f"{command!r} {_NO_INPUT}.")
        elif command:
            return _refused(
                command,
                f'[Your command "{command}" is NOT executed. The previous command is still running - You CANNOT send '
                "new commands until the previous command is completed. By setting `is_input` to `true`, you can "
                f"interact with the current process: {TIMEOUT_MESSAGE_TEMPLATE}]",
            )
        return self._wait(command, seconds)

    def interrupt(self) -> None:
        """Send Ctrl-C to a command that is running, until it has ended, for seconds; from any thread, at once."""
        if (running := self._running) is not None:
            threading.Thread(target=self._interrupt, args=(running[1],), name="rl-interrupt", daemon=True).start()

    def _interrupt(self, ended: Future[CommandResult]) -> None:
        # One that comes between two programs of a command ends neither.
        until = time.monotonic() + _INTERRUPTED
        while not ended.done() and time.monotonic() < until:
            with suppress(InfrastructureError):
                self._workspace.interrupt()
            wait((ended,), 1.0)

    def _start(self, command: str) -> None:
        ended: Future[CommandResult] = Future()

        def run() -> None:
            try:
                ended.set_result(self._workspace.run(command, timeout=None))
            except InfrastructureError as error:
                ended.set_exception(error)

        self._running = command, ended
        threading.Thread(target=run, name="rl-terminal", daemon=True).start()

    def _wait(self, said: str, seconds: float) -> TerminalObservation:
        assert self._running is not None
        command, ended = self._running
        try:
            result = ended.result(seconds)
        except TimeoutError:
            suffix = f"\n[The command timed out after {seconds} seconds. {TIMEOUT_MESSAGE_TEMPLATE}]"
            return _observation(said, "", CmdOutputMetadata(suffix=suffix))
        except SandboxEndedError:
            self._running = None
            return _observation(said, "", CmdOutputMetadata(suffix=_ENDED, working_dir=self._workspace.start))
        except BaseException:
            self._running = None
            raise
        self._running = None
        prefix = ""
        if said != command:
            prefix = "[Below is the output of the previous command.]\n"
        elif result.earlier:
            prefix = (
                f"[Output of background processes since the last command.]\n{result.earlier}\n"
                "[Output of this command.]\n"
            )
        code = -1 if result.exit_code is None else result.exit_code
        sent = " CTRL+C was sent." if said == _INTERRUPT else ""
        metadata = CmdOutputMetadata(
            exit_code=code,
            working_dir=result.cwd,
            py_interpreter_path=result.python,
            prefix=prefix,
            suffix=f"\n[The command completed with exit code {code}.{sent}]",
        )
        return _observation(said, result.output, metadata)

    def _reset(self, command: str, timeout: float | None) -> TerminalObservation:
        self._workspace.restart()
        self._running = None
        if not command:
            return TerminalObservation.from_text(text=_RESET, command="[RESET]", exit_code=0)
        ran = self.execute(TerminalAction(command=command, timeout=timeout))
        told = TerminalObservation.from_text(text=f"{_RESET}\n\n{ran.text}", command=None)
        return ran.model_copy(update={"content": told.content, "command": f"[RESET] {command}"})


def _observation(command: str, output: str, metadata: CmdOutputMetadata) -> TerminalObservation:
    text = maybe_truncate(output.rstrip(), truncate_after=MAX_CMD_OUTPUT_SIZE)
    return TerminalObservation.from_text(
        text=text, command=command, metadata=metadata, exit_code=metadata.exit_code, timeout=False
    )


def _refused(command: str, why: str) -> TerminalObservation:
    return TerminalObservation.from_text(text=why, command=command, is_error=True)
