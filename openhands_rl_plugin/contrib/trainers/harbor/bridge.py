"""Commands of another process, run in the environment of a trial: what ``environments.container.place`` speaks to.

Imported by Harbor's Python. Nothing is served beyond this machine: the socket is in a folder that its user alone reads.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.environments.container.place import LONGEST_LINE
from openhands_rl_plugin.environments.container.programs import answer, marked

_LONGEST = 75
"""Bytes of the folder for temporary files."""


class Ran(Protocol):
    """Harbor's ``ExecResult``."""

    stdout: str | None
    stderr: str | None
    return_code: int


class Runs(Protocol):
    """What is needed of Harbor's ``BaseEnvironment``."""

    def exec(self, command: str, *, timeout_sec: int | None = None) -> Awaitable[Ran]:
        """Run a command by the container's bash, as the trial's user."""
        ...


async def directory_of(environment: Runs, seconds: int) -> str:
    """Where its commands begin; ``/`` where it does not say that. Raises what ``exec`` raises."""
    ran = await environment.exec(marked("pwd"), timeout_sec=seconds)
    try:
        code, lines = answer(ran.stdout or "")
    except ValueError:
        return "/"
    return lines[0] if not code and lines else "/"


@asynccontextmanager
async def served(environment: Runs) -> AsyncIterator[Path]:
    """The socket at which commands are run in ``environment``, until the end of the block, which cancels the rest."""
    running: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_serve(environment, reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    # A socket's path has at most 103 bytes (macOS).
    long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST
    with tempfile.TemporaryDirectory(prefix="rl-harbor-", dir="/tmp" if long else None) as folder:  # 0700, see above
        path = Path(folder) / "exec"
        server = await asyncio.start_unix_server(begin, str(path), limit=LONGEST_LINE)
        try:
            yield path
        finally:
            server.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _serve(environment: Runs, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        asked = json.loads(await reader.readline())
        limit = asked["timeout"]
        call = asyncio.ensure_future(
            environment.exec(asked["command"], timeout_sec=None if limit is None else math.ceil(limit))
        )
        gone = asyncio.ensure_future(reader.read())  # nothing more is sent: this ends where the other side does
        try:
            await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                writer.write(json.dumps(_answer(call)).encode() + b"\n")
                await writer.drain()
        finally:
            for each in (call, gone):
                each.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)
    except (ValueError, KeyError, ConnectionError):
        pass  # no request, or nobody who waits for the answer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _answer(call: asyncio.Future[Ran]) -> dict[str, object]:
    # What environments raise differs from one to another; the episode fails of it, by its kind.
    if (error := call.exception()) is not None:
        return {"error": describe(error)}
    ran = call.result()
    return {"return_code": ran.return_code, "stdout": ran.stdout or "", "stderr": ran.stderr or ""}
