"""Fast copies of a workspace directory, for search, which tries out commands in many of them.

The methods in order of preference: a mount that holds only the changes (``overlay``), whose support is tested once per
file system, and a ``copy``, whose files share their blocks until one is written where the file system can (btrfs, xfs).

A copy by overlay shows the original below its own changes, so the original must not change while the copy is in use.
Its mount lives in a namespace of the sandbox and always ends with it. Renaming a directory of the original fails with
EXDEV there, which ``mv`` and ``shutil.move`` handle.
"""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.sandbox import (
    INSIDE,
    BubblewrapSandbox,
    Overlay,
    can_overlay,
    search_path,
)

ForkMethod = Literal["overlay", "copy"]

METHODS: tuple[ForkMethod, ...] = ("overlay", "copy")

_GIBIBYTE = 1024**3
_POLL = 0.01


class ForkLimits(Frozen):
    """Limits of one copy: bytes and files that are physically copied, and seconds."""

    size: int = Field(default=2 * _GIBIBYTE, ge=0)
    files: int = Field(default=200_000, ge=0)
    seconds: float = Field(default=30.0, gt=0)


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
    limits: ForkLimits | None = None,
    methods: Sequence[ForkMethod] = METHODS,
    stop: threading.Event | None = None,
    live: bool = False,
) -> Tree:
    """A copy of ``source`` below ``into``, an existing empty directory of the caller. Blocks. ``live``: as in
    ``copy_tree``.

    Raises ``BadEnvironmentError`` when a limit is reached or none of ``methods`` works here: this workspace cannot be
    forked. Raises ``InfrastructureError`` when ``stop`` is set or the copying fails.
    """
    limits = limits or ForkLimits()
    target = into / "workspace"
    target.mkdir()
    if source.overlay is not None or ("overlay" in methods and can_overlay(into.parent, source.directory, into)):
        lower = source.overlay.lower if source.overlay else source.directory
        overlay = Overlay(lower, into / "upper", into / "work", target)
        overlay.work.mkdir()
        overlay.upper.mkdir()
        if source.overlay is not None:
            copy_tree(source.overlay.upper, overlay.upper, limits=limits, stop=stop, live=live)
        return Tree(target, overlay, "overlay")
    if "copy" not in methods:
        raise BadEnvironmentError(f"the workspace cannot be copied here by {' or '.join(methods)}")
    copy_tree(source.directory, target, limits=limits, stop=stop, live=live)
    return Tree(target, None, "copy")


def copy_tree(
    source: Path,
    target: Path,
    *,
    limits: ForkLimits,
    stop: threading.Event | None = None,
    leave_out: frozenset[str] = frozenset(),
    live: bool = False,
) -> None:
    """Copy the content of ``source``, except the names ``leave_out``, to ``target``: with modes, times and attributes.

    Symbolic links are copied, not followed. Files share their blocks until one is written where the file system can.
    ``live``: processes of a session may put a link in a folder's place meanwhile; it then leads nowhere, because the
    copying sees nothing else of the host, and owners are not kept. Raises ``BadEnvironmentError`` where a limit is
    reached, and ``InfrastructureError``.
    """
    present = leave_out & set(os.listdir(source)) if leave_out else set()
    parts = [f"{source}/{name}" for name in os.listdir(source) if name not in present] if present else [f"{source}/."]
    _check_size(parts, limits)
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
    deadline, null, found = time.monotonic() + limits.seconds, subprocess.DEVNULL, {**os.environ, "PATH": search_path()}
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=null, stdout=null, stderr=said, env=found) as process,
    ):
        while True:
            try:
                status = process.wait(_POLL)
                break
            except subprocess.TimeoutExpired:
                if (stop is not None and stop.is_set()) or time.monotonic() > deadline:
                    process.kill()
        if status:
            said.seek(0)
            words = said.read(4096).decode("utf-8", "replace").strip().splitlines()
            reason = f"it took longer than {limits.seconds:g} s" if time.monotonic() > deadline else "it was cancelled"
            full = words and words[-1].endswith(os.strerror(errno.ENOSPC))
            # Others than cp speak where the sandbox, or cp in it, does not start.
            by_session = words and words[0].startswith("cp: ") and not full
            kind = BadEnvironmentError if by_session else InfrastructureError
            raise kind(f"copying the workspace failed: {words[-1] if words else reason}")


def _check_size(paths: Sequence[str], limits: ForkLimits) -> None:
    files = size = 0
    folders = [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]

    def refuse(error: OSError) -> None:
        raise BadEnvironmentError(f"the workspace cannot be copied for a search: {error.strerror}") from error

    for folder, below, names in (each for path in folders for each in os.walk(path, onerror=refuse)):
        files += len(below) + len(names)
        with suppress(FileNotFoundError):
            size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
        if files > limits.files or size > limits.size:
            found = f"{limits.files} files" if files > limits.files else f"{limits.size >> 20} MiB"
            raise BadEnvironmentError(
                f"the workspace is too large to be copied for a search: it has more than {found}; make it smaller, or "
                'use a strategy and a value that need no copies (BestOfN or ToT with value = "model" or '
                '"verifier", StandardReAct)'
            )
