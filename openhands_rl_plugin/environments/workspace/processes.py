"""Runs programs to their end, with a time limit; no process is left behind when anything fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.cgroups import in_group, make_group, remove_group
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits

_CHUNK = 2**16
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # else it has ended before
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Ended(NamedTuple):
    """How a program ended. ``output`` is stdout with stderr, at most ``keep`` bytes of it; ``truncated``: whether
    there was more. ``code`` is negative for a signal.
    """

    code: int
    output: bytes
    seconds: float
    timed_out: bool = False
    truncated: bool = False

    @property
    def text(self) -> str:
        """The output as text; bytes that are no UTF-8 become replacement signs."""
        return self.output.decode("utf-8", "replace")

    @property
    def last_line(self) -> str:
        """The last line with content, for an error message; lines of a shell trace (``set -x``) do not count, nor does
        the advice that some programs end with.
        """
        lines = [line.strip() for line in self.text[-20_000:].splitlines() if line.strip() and line[0] != "+"]
        lines = [line for line in lines if not (line.startswith("Run '") and "--help' for more" in line)] or lines
        return lines[-1][:300] if lines else f"exit status {self.code}, without output"


async def run(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    directory: Path | None = None,
    variables: Mapping[str, str] | None = None,
    given: bytes | None = None,
    keep: int = 64 * 2**20,
    limits: SandboxLimits | None = None,
) -> Ended:
    """Run ``command`` with ``given`` on stdin (else nothing), in a process group of its own, which is killed at the
    time limit and when this task is cancelled. ``limits``: in a control group with these, where one can be made.

    Raises ``InfrastructureError`` when the program cannot be started.
    """
    began = time.monotonic()
    group = await asyncio.to_thread(make_group, limits.processes, limits.memory) if limits is not None else None
    try:
        process = await asyncio.create_subprocess_exec(
            *in_group(group),
            *command,
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=None if variables is None else dict(variables),
            start_new_session=True,
        )
    except OSError as error:
        raise InfrastructureError(f"cannot start {command[0]}: {error.strerror}") from error
    kept = bytearray()
    truncated = timed_out = False

    async def read() -> None:
        nonlocal truncated
        assert process.stdout is not None
        while chunk := await process.stdout.read(_CHUNK):
            kept.extend(chunk[: keep - len(kept)])
            truncated = truncated or len(kept) >= keep

    async def write() -> None:
        if given is not None and process.stdin is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(given)
                await process.stdin.drain()
            process.stdin.close()

    try:
        async with asyncio.timeout(timeout):
            await asyncio.gather(write(), read())
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        if group is not None:
            await asyncio.shield(asyncio.to_thread(remove_group, group))
    return Ended(process.returncode or 0, bytes(kept), time.monotonic() - began, timed_out, truncated)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command line of a program that is killed when the thread that starts it ends, with its process or alone."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


async def checked(command: Sequence[str], what: str, **options) -> Ended:
    """``run``, which must succeed. Raises ``InfrastructureError`` with the last line of the program's output."""
    ended = await run(command, **options)
    if ended.timed_out:
        raise InfrastructureError(f"{what}: timed out after {ended.seconds:.0f} s")
    if ended.code:
        raise InfrastructureError(f"{what}: {ended.last_line}")
    return ended
