"""``openhands-rl acp`` as a process, with the protocol package's own client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import acp
from acp.schema import AllowedOutcome, DeniedOutcome, RequestPermissionResponse

PROGRAM = Path(sys.executable).parent / "openhands-rl"


@dataclass
class Editor:
    """What an editor would show, and its user's answers. ``answer``: to the n-th question, an option or ``None``."""

    answer: Callable[[int], str | None] = lambda number: "once"
    updates: list[Any] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    async def session_update(self, session_id: str, update: Any, **more: Any) -> None:
        """Called by the package."""
        self.updates.append(update)

    async def request_permission(self, options: Any, session_id: str, tool_call: Any, **more: Any) -> Any:
        """Called by the package."""
        self.asked.append(tool_call)
        chosen = self.answer(len(self.asked) - 1)
        if chosen is None:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        assert chosen in {option.option_id for option in options}
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen))

    def on_connect(self, conn: Any) -> None:
        """Called by the package."""

    def forget(self, answer: Callable[[int], str | None] = lambda number: "once") -> None:
        """As new, with other answers."""
        self.updates, self.asked, self.answer = [], [], answer

    async def settled(self) -> None:
        """Wait until nothing comes any more: the package does not hand out notifications before a response."""
        known = -1
        while known != len(self.updates):
            known = len(self.updates)
            await asyncio.sleep(0.3)

    def kinds(self) -> list[str]:
        """The updates' kinds, in order."""
        return [update.session_update for update in self.updates]

    def said(self, kind: str = "agent_message_chunk") -> str:
        """The text of the updates of one kind."""
        return "".join(update.content.text for update in self.updates if update.session_update == kind)


@dataclass
class Connected:
    """A connection that is initialised, and the process behind it."""

    agent: Any
    editor: Editor
    process: asyncio.subprocess.Process
    hello: Any
    log: Path

    async def ended(self) -> int:
        """Close the process's input and wait for its end; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await asyncio.wait_for(self.process.wait(), 60)


@asynccontextmanager
async def connected(
    folder: Path, *words: str, editor: Editor | None = None, protocol_version: int = acp.PROTOCOL_VERSION
) -> AsyncIterator[Connected]:
    """The command in ``folder``, which is its home, too."""
    environ = {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "HOME": str(folder), "TMPDIR": str(folder)}
    editor = editor or Editor()
    log = folder / "acp.log"
    with log.open("a") as errors:
        process = await asyncio.create_subprocess_exec(
            str(PROGRAM),
            "acp",
            *words,
            cwd=folder,
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=50 * 1024 * 1024,
        )
    try:
        connection = acp.connect_to_agent(editor, process.stdin, process.stdout)  # type: ignore[arg-type]
        hello = await asyncio.wait_for(connection.initialize(protocol_version=protocol_version), 150)
        yield Connected(connection, editor, process, hello, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
