"""Fast copies of a workspace directory, for search, which tries commands in many of them.

The methods, in order of preference: an ``overlay`` mount, which holds only the changes (support is tested once per file
system), and a ``copy``. On btrfs and xfs, copied files share their blocks until one is written.

A copy by overlay shows the original below its own changes, so the original must not change while the copy is in use.
Its mount lives in a namespace of the sandbox and always ends with it. Renaming a directory of the original fails with
EXDEV there, which ``mv`` and ``shutil.move`` handle.
"""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.environments.workspace.sandbox import (
    INSIDE,
    BubblewrapSandbox,
    Overlay,
    can_overlay,
    search_path,
)

ForkMethod = Literal["overlay", "copy"]

FORK_SECONDS = 30.0
"""Time limit for one copy of a workspace."""


@dataclass(frozen=True)
class Tree:
    """A workspace on the host: a plain ``directory``, or an empty one over which an overlay is mounted."""

    directory: Path
    overlay: Overlay | None = None
    method: ForkMethod | None = None

    def mounting(self, *, read_only: bool = False) -> list[str]:
        """A command that mounts the overlay and then executes its arguments; empty without an overlay."""
        return self.overlay.mounting(read_only=read_only) if self.overlay else []


def fork_tree(
    source: Tree,
    into: Path,
    *,
    seconds: float = FORK_SECONDS,
    overlay: bool = True,
    live: bool = False,
) -> Tree:
    """Make a copy of ``source`` in ``into``, an existing empty directory of the caller. Blocks.

    ``overlay``: mount an overlay if that is possible; ``live``: as in ``copy_tree``, which raises the same errors.
    """
    target = into / "workspace"
    target.mkdir()
    if source.overlay is not None or (overlay and can_overlay(into.parent, source.directory, into)):
        lower = source.overlay.lower if source.overlay else source.directory
        layers = Overlay(lower, into / "upper", into / "work", target)
        layers.work.mkdir()
        layers.upper.mkdir()
        if source.overlay is not None:
            copy_tree(source.overlay.upper, layers.upper, seconds=seconds, live=live)
        return Tree(target, layers, "overlay")
    copy_tree(source.directory, target, seconds=seconds, live=live)
    return Tree(target, None, "copy")


def copy_tree(
    source: Path,
    target: Path,
    *,
    seconds: float = FORK_SECONDS,
    leave_out: frozenset[str] = frozenset(),
    live: bool = False,
) -> None:
    """Copy the content of ``source``, except the names ``leave_out``, to ``target``: with modes, times and attributes.

    Symbolic links are copied, not followed. Where the file system can, files share blocks until one is written.
    ``live``: processes of the session still run, and may replace a folder by a link. So the copy runs in a sandbox that
    shows nothing else of the host, and owners are not kept. Raises ``BadEnvironmentError`` if the content cannot be
    copied, or not within ``seconds``, and ``InfrastructureError``.
    """
    try:
        names = set(os.listdir(source))
    except OSError as error:
        raise BadEnvironmentError(f"copying the workspace failed: {error.strerror}") from error
    parts = [f"{source}/{name}" for name in names - leave_out] if leave_out & names else [f"{source}/."]
    target.mkdir(exist_ok=True)
    if not parts:
        return
    keep = "mode,timestamps,links,xattr" if live else "all"
    command = ["cp", "-dR", f"--preserve={keep}", "--reflink=auto", f"--target-directory={target}", "--"]
    if live:
        inside = [INSIDE + part.removeprefix(str(source)) for part in parts]
        command = BubblewrapSandbox(source).wrap([*command, *inside], [target])
    else:
        command += parts
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={**os.environ, "PATH": search_path()},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BadEnvironmentError(
            f"the workspace is too large to be copied in {seconds:g} s: make it smaller, or use StandardReAct"
        ) from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        full = lines[-1].endswith(os.strerror(errno.ENOSPC))
        # If the sandbox or cp does not start, the message is another program's.
        kind = BadEnvironmentError if lines[0].startswith("cp: ") and not full else InfrastructureError
        raise kind(f"copying the workspace failed: {lines[-1][:300]}")
