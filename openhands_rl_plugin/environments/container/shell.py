"""A session's shell in a container of another program."""

from __future__ import annotations

import base64
import binascii
import threading

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.environments.container import programs
from openhands_rl_plugin.environments.container.place import ContainerPlace, execute
from openhands_rl_plugin.environments.workspace.shell import CommandResult

SECONDS = 60.0
"""Of what is no command of the agent."""


class SessionLostError(InfrastructureError):
    """The container answers, but what is the session's own in it does not: a command of the agent may have removed
    it."""


class ContainerShell:
    """``cd``, variables, functions and background processes last from command to command. Thread-safe.

    The first and the last 64 KiB of an output are told; one that passes ``programs.MOST_WRITTEN`` ends its command.
    A command that removes what is the session's own ends the shell, as one that kills a terminal's would: the result
    says so, and the next command has a new one. ``failure``: how the container's owner failed last, empty where it
    never did.
    """

    def __init__(self, place: ContainerPlace) -> None:
        """Makes the session's folder. Raises ``InfrastructureError``, also for an image without a program it needs."""
        self.place = place
        self.failure = ""
        self._one_at_a_time = threading.Lock()
        self._asked(programs.begin(place.folder))

    def run(self, command: str, *, timeout: float | None) -> CommandResult:
        """Run ``command`` for at most ``timeout`` seconds; then its processes are killed.

        Raises ``InfrastructureError``.
        """
        with self._one_at_a_time:
            try:
                return self._ran(command, timeout)
            except SessionLostError as lost:
                return self._begun_anew(str(lost))

    def put(self, data: bytes, name: str) -> str:
        """Write a file of the session's folder, up to its last piece, which the command that is returned writes.

        Raises ``InfrastructureError``.
        """
        path = f"{self.place.folder}/{name}"
        pieces = [data[at : at + programs.PIECE] for at in range(0, len(data), programs.PIECE)] or [b""]
        *most, last = [programs.put(piece, path, first=number == 0) for number, piece in enumerate(pieces)]
        for command in most:
            self._asked(command)
        return last

    def interrupt(self) -> None:
        """Send Ctrl-C (SIGINT) to the command that is running. Raises ``InfrastructureError``."""
        self.ask(programs.interrupt(self.place.folder))

    def restart(self) -> None:
        """End all that commands started, but for what left its process group, and forget the shell's state."""
        self.ask(programs.restart(self.place.folder))

    def close(self) -> None:
        """End the command that is running, and remove what is the session's own. What runs in the background stays."""
        self.ask(programs.end(self.place.folder))

    def _ran(self, command: str, timeout: float | None) -> CommandResult:
        written = self.put(whole_text(command).encode(errors="surrogateescape"), "command")
        limit = None if timeout is None else timeout + SECONDS
        told = self._asked(f"{written} && {programs.run(self.place.folder, self.place.start, timeout)}", limit)
        try:
            return _result(told)
        except (ValueError, TypeError, binascii.Error) as error:
            raise SessionLostError("the container's answer to a command is none of the session's") from error

    def _begun_anew(self, why: str) -> CommandResult:
        try:
            self._asked(programs.begin_anew(self.place.folder))
            now = "and a new one was begun"
        except SessionLostError:
            now = "and no new one can be begun"
        return CommandResult(output=f"[The shell was lost, {now}: {why}]", exit_code=1, cwd=self.place.start)

    def ask(self, command: str, timeout: float | None = SECONDS) -> tuple[int, list[str]]:
        """The exit code and the lines of one command of the session's own. Raises ``InfrastructureError``."""
        try:
            ran = execute(self.place, programs.marked(command), timeout=timeout)
        except InfrastructureError as error:
            self.failure = str(error)
            raise
        try:
            return programs.answer(ran.stdout)
        except ValueError:
            said = f"{ran.stdout}\n{ran.stderr}".strip().splitlines()
            why = f"exit code {ran.return_code}: {said[-1]}" if ran.return_code and said else "it was cut on its way"
            self.failure = f"the container's answer to a command is none: {why}"
            raise InfrastructureError(self.failure) from None

    def _asked(self, command: str, timeout: float | None = SECONDS) -> list[str]:
        code, lines = self.ask(command, timeout)
        if code:
            why = lines[-1] if lines else f"exit code {code}"
            raise SessionLostError(f"a command of the session failed in the container: {why}")
        return lines


def _result(lines: list[str]) -> CommandResult:
    ended, cwd, *parts = lines
    code, why = ended.split()
    where, _, python = _decoded(cwd).partition("\0")
    earlier, output = _shown(*parts[:3]), _shown(*parts[3:])
    if why == "output":
        output += f"\n[The command was ended: it wrote more than {programs.MOST_WRITTEN >> 20} MiB.]"
    return CommandResult(
        output=output,
        earlier=earlier,
        exit_code=None if why == "time" else int(code),
        timed_out=why == "time",
        cwd=where,
        python=python.strip(),
    )


def _shown(size: str, head: str, tail: str) -> str:
    cut = int(size) - 2 * programs.MOST_SHOWN
    return f"{_decoded(head)}\n[... {cut} bytes of output cut ...]\n{_decoded(tail)}" if tail else _decoded(head)


def _decoded(text: str) -> str:
    return base64.b64decode(text, validate=True).decode(errors="replace")
