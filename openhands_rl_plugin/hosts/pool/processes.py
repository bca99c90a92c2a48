"""A worker process of this machine, with messages on its stdin and stdout."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from openhands_rl_plugin.core.errors import InfrastructureError, describe
from openhands_rl_plugin.hosts.pool.messages import MAX_LINE_BYTES

_MODULE = "openhands_rl_plugin.hosts.pool.worker"
CLOSE_TIMEOUT = 10.0
"""Seconds for a worker to close its sessions; one takes up to five (``_CLOSE_TIMEOUT`` of a host's runner)."""

# Lines of stderr. A traceback ends with its cause, so a few are enough.
_KEPT_LINES = 20


class ProcessChannel:
    """A ``WorkerChannel`` to a child process. Create it with ``start``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._error_reader = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls) -> ProcessChannel:
        """Start a process. Raises ``InfrastructureError``."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"no worker process could be started: {error}") from error
        return cls(process)

    async def send(self, line: bytes) -> None:
        """As in ``WorkerChannel``."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._stdin.write(line)
            await self._stdin.drain()

    async def receive(self) -> Sequence[bytes]:
        """As in ``WorkerChannel``, one line at a time."""
        try:
            line = await self._stdout.readline()
        except ValueError as error:
            raise InfrastructureError(f"a worker process sent too long a line: {describe(error)}") from error
        return (line,) if line else ()

    async def exit_message(self) -> str:
        """As in ``WorkerChannel``: the signal, or the status and the last line of stderr."""
        status = await self._process.wait()
        await self._error_reader
        if status < 0 or not self._last_lines:
            return f"a worker process was ended by signal {-status}" if status else "a worker process ended"
        return f"a worker process ended with status {status}: {self._last_lines[-1][:300]!r}"

    def kill(self) -> None:
        """As in ``WorkerChannel``."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Close its stdin, which ends it; kill it if it does not end."""
        self._stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self._last_lines.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())
