"""Runs programs to their end, with a time limit; no process is left behind when anything fails.

Control groups (version 2) bound processes and memory of a session, for root too. A group is made next to or below this
process's own, where this user may: as root, or where systemd delegated the place.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits

_CHUNK, _KEPT = 2**16, 64 * 2**20
_LONGEST_REST = 5.0


class Ended(NamedTuple):
    """How a program ended. ``output`` is stdout with stderr, at most 64 MiB of it; ``truncated``: whether
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
        """The last line with content, for an error message; lines of a shell trace (``set -x``) do not count."""
        lines = [line.strip() for line in self.text[-20_000:].splitlines() if line.strip() and line[0] != "+"]
        return lines[-1][:300] if lines else f"exit status {self.code}, without output"


async def run(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
    given: bytes | None = None,
    limits: SandboxLimits | None = None,
) -> Ended:
    """Run ``command`` with ``given`` on stdin, in a process group of its own, which is killed at the
    time limit and when this task is cancelled. ``limits``: in a control group with these, where one can be made.

    Raises ``InfrastructureError`` when the program cannot be started.
    """
    began = time.monotonic()
    group = await asyncio.to_thread(make_group, limits) if limits is not None else None
    env = None if variables is None else dict(variables)
    try:
        try:
            process = await start(*in_group(group), *command, stderr=subprocess.STDOUT, env=env)
        except OSError as error:
            raise InfrastructureError(f"cannot start {command[0]}: {error.strerror}") from error
        assert process.stdin is not None and process.stdout is not None
        # No file: a process of the sandbox that keeps its descriptor would let tests read it once more.
        process.stdin.write(given or b"")
        process.stdin.close()
        kept, timed_out = bytearray(), False
        try:
            async with asyncio.timeout(timeout):
                while chunk := await process.stdout.read(_CHUNK):
                    kept.extend(chunk[: _KEPT - len(kept)])
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await kill(process)
    finally:
        await asyncio.shield(asyncio.to_thread(remove_group, group))
    return Ended(process.returncode or 0, bytes(kept), time.monotonic() - began, timed_out, len(kept) >= _KEPT)


async def start(*words: str, stderr: int = subprocess.PIPE, env: Mapping[str, str] | None) -> Process:
    """A process in a group of its own, with pipes. It is killed where this task is cancelled during the start."""
    pipe = subprocess.PIPE
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=stderr, env=env, start_new_session=True)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The program may run already, with children that hold its pipes: asyncio would wait for them.
        await asyncio.shield(_kill_started(starting))
        raise


async def _kill_started(starting: Awaitable[Process]) -> None:
    with suppress(OSError):
        await kill(await starting)


async def kill(process: Process) -> None:
    """Kill the process, unless it ended, with its group, and wait for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Its end is not seen before all that it wrote is read, and a program that left the group may hold its pipes.
        try:
            await asyncio.shield(asyncio.wait_for(process.communicate(), _LONGEST_REST))
        except TimeoutError:
            process._transport.close()  # pyrefly: ignore[missing-attribute]


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command line of a program that is killed when the thread that starts it ends, with its process or alone."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


async def checked(command: Sequence[str], what: str, **options) -> Ended:
    """``run``, which must succeed. Raises ``InfrastructureError`` with the last line of the program's output."""
    ended = await run(command, **options)
    if ended.timed_out:
        raise InfrastructureError(f"{what}: timed out after {ended.seconds:.0f} s")
    if ended.code:
        raise InfrastructureError(f"{what}: {ended.last_line}")
    return ended


_PREFIX = "openhands-rl-"
_JOIN = 'echo $$ > "$0"/cgroup.procs && exec "$@"'


def in_group(group: Path | None) -> Sequence[str]:
    """The beginning of a command line that runs in the group."""
    return () if group is None else ("sh", "-c", _JOIN, str(group))


def make_group(limits: SandboxLimits) -> Path | None:
    """A group whose processes, with their threads, are within the limits; ``None`` where none can be made.
    Thread-safe."""
    place = _place()
    with suppress(OSError):
        return None if place is None else _made(place, limits)
    return None


def remove_group(group: Path | None) -> None:
    """Kill what is left in it, and remove it."""
    if group is None:
        return
    with suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + 5
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.002)


@functools.cache
def _place() -> Path | None:
    """The nearest folder above this process whose groups have both bounds, and into which processes may be put."""
    try:
        mount = next(
            line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if " cgroup2 " in line
        )
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        start = Path(f"{mount}{own}")
        above = [folder for folder in (start, *start.parents) if folder.is_relative_to(mount)]
        for place in above:
            enabled = (place / "cgroup.subtree_control").read_text().split()
            if {"pids", "memory"} <= {*enabled} and os.access(place, os.W_OK):
                for old in place.glob(f"{_PREFIX}*"):  # those of killed processes, too
                    if not Path("/proc", old.name.removeprefix(_PREFIX).partition("-")[0]).exists():
                        remove_group(old)
                group = _made(place, SandboxLimits())
                joined = subprocess.run([*in_group(group), "true"], capture_output=True, check=False)
                remove_group(group)
                return None if joined.returncode else place
    except (OSError, StopIteration):
        pass
    return None


def _made(place: Path, limits: SandboxLimits) -> Path:
    group = place / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    (group / "pids.max").write_text(str(limits.processes))
    (group / "memory.max").write_text(str(limits.memory))
    return group
