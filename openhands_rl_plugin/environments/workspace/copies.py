"""Copies of a workspace directory that are made fast: for search, which tries out commands in many of them.

In this order: a mount that holds only what changes (``overlay``), files that share their blocks until one is written
(``reflink``, on btrfs and xfs; every file is made anew, which takes five times as long for 3,000 files), and a plain
``copy``. What is possible is tried out once for each file system.

A copy by overlay shows the original below its own changes, so that the original has to hold still for as long as the
copy is used. Its mount lives in a namespace of the sandbox, and ends with it whatever happens. Renaming a directory
that the original has is answered by EXDEV there, which ``mv`` and ``shutil.move`` handle.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.types import Frozen

ForkMethod = Literal["overlay", "reflink", "copy"]

METHODS: tuple[ForkMethod, ...] = ("overlay", "reflink", "copy")

_GIBIBYTE = 1024**3
_FICLONE = 0x40049409
_POLL = 0.01
_PROBE_PATIENCE = 10.0
# Commas, colons and backslashes have a meaning in the options of a mount.
_MOUNTABLE = re.compile(r"[\w./@+-]+")
_MOUNT = 'mount -t overlay overlay -o "$1" "$2" && shift 2 && exec "$@"'


class ForkLimits(Frozen):
    """Bounds of one copy: bytes and files that are really copied, and seconds."""

    size: int = Field(default=2 * _GIBIBYTE, ge=0)
    files: int = Field(default=200_000, ge=0)
    seconds: float = Field(default=30.0, gt=0)


@dataclass(frozen=True)
class Overlay:
    """A view of ``lower`` with the changes in ``upper`` on top; ``work`` is the kernel's own."""

    lower: Path
    upper: Path
    work: Path


@dataclass(frozen=True)
class Tree:
    """A workspace as the host has it: a plain ``directory``, or an empty one over which an overlay is mounted."""

    directory: Path
    overlay: Overlay | None = None
    method: ForkMethod | None = None

    def mounting(self, *, read_only: bool = False) -> list[str]:
        """The command that makes the tree visible at ``directory`` and then executes its arguments; often none.

        A read-only view may be mounted beside a writable one.
        """
        if self.overlay is None:
            return []
        if read_only:
            options = f"lowerdir={self.overlay.upper}:{self.overlay.lower},userxattr"
        else:
            layers = (self.overlay.lower, self.overlay.upper, self.overlay.work)
            options = "lowerdir={},upperdir={},workdir={},userxattr".format(*layers)
        return _in_namespace(options, self.directory)


def fork_tree(
    source: Tree,
    into: Path,
    *,
    limits: ForkLimits | None = None,
    methods: Sequence[ForkMethod] = METHODS,
    stop: threading.Event | None = None,
) -> Tree:
    """A copy of ``source`` below ``into``, an existing empty directory of the caller's. Blocks.

    Raises ``BadEnvironmentError`` when a limit is reached or none of ``methods`` works here: the workspace does not
    fork as it stands. Raises ``InfrastructureError`` when ``stop`` is set or the copying fails.
    """
    limits, stop = limits or ForkLimits(), stop or threading.Event()
    target = into / "workspace"
    target.mkdir()
    if source.overlay is not None:
        overlay = Overlay(source.overlay.lower, into / "upper", into / "work")
        overlay.work.mkdir()
        copy_tree(source.overlay.upper, overlay.upper, limits=limits, stop=stop)
        return Tree(target, overlay, "overlay")
    method = _first_that_works(methods, source.directory, into)
    if method == "overlay":
        overlay = Overlay(source.directory, into / "upper", into / "work")
        overlay.upper.mkdir()
        overlay.work.mkdir()
        return Tree(target, overlay, method)
    bounds = limits if method == "copy" else limits.model_copy(update={"size": sys.maxsize})
    copy_tree(source.directory, target, limits=bounds, stop=stop)
    return Tree(target, None, method)


def copy_tree(
    source: Path,
    target: Path,
    *,
    limits: ForkLimits,
    stop: threading.Event,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """Copy what is in ``source``, but the names ``leave_out``, into ``target``: with modes, times and attributes.

    Symbolic links are copied, not followed. Files share their blocks until one is written where the file system can.
    Raises ``InfrastructureError``.
    """
    present = leave_out & set(os.listdir(source)) if leave_out else set()
    parts = [f"{source}/{name}" for name in os.listdir(source) if name not in present] if present else [f"{source}/."]
    _check_size(parts, limits)
    target.mkdir(exist_ok=True)
    if not parts:
        return
    command = ["cp", "-a", "--reflink=auto", f"--target-directory={target}", "--", *parts]
    deadline = time.monotonic() + limits.seconds
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said) as process,
    ):
        while True:
            try:
                status = process.wait(_POLL)
                break
            except subprocess.TimeoutExpired:
                if stop.is_set() or time.monotonic() > deadline:
                    process.kill()
        if status:
            said.seek(0)
            words = said.read(4096).decode("utf-8", "replace").strip().splitlines()
            reason = f"it took longer than {limits.seconds:g} s" if time.monotonic() > deadline else "it was given up"
            raise InfrastructureError(f"copying the workspace failed: {words[-1] if words else reason}")


def remove_tree(directory: Path) -> None:
    """Remove a copy, also the kernel's directories in it that nobody may read; what resists is left."""

    def open_up(function: object, path: str, error: BaseException) -> None:
        if isinstance(error, PermissionError):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(directory, onexc=open_up)


def _check_size(paths: Sequence[str], limits: ForkLimits) -> None:
    files = size = 0
    pending = [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_size
        if files > limits.files or size > limits.size:
            found = f"{limits.files} files" if files > limits.files else f"{limits.size >> 20} MiB"
            raise BadEnvironmentError(
                f"the workspace is too large to be copied for a search: it has more than {found}; make it smaller, or "
                'take a strategy and a value that can do without copies (BestOfN or ToT with value = "model" or '
                '"verifier", StandardReAct)'
            )


_ABILITIES: dict[tuple[ForkMethod, int], bool] = {}
"""What was found out, by the device that copies lie on. Two threads may find out the same."""


def _first_that_works(methods: Sequence[ForkMethod], source: Path, into: Path) -> ForkMethod:
    for method in methods:
        if _works(method, source, into):
            return method
    raise BadEnvironmentError(f"the workspace cannot be copied here by {' or '.join(methods)}")


def _works(method: ForkMethod, source: Path, into: Path) -> bool:
    device = os.stat(into).st_dev
    if method == "copy":
        return True
    if method == "reflink" and os.stat(source).st_dev != device:
        return False
    if method == "overlay" and not all(_MOUNTABLE.fullmatch(str(path)) for path in (source, into)):
        return False
    if (method, device) not in _ABILITIES:
        _ABILITIES[method, device] = (_can_reflink if method == "reflink" else _can_overlay)(into.parent)
    return _ABILITIES[method, device]


def _can_reflink(directory: Path) -> bool:
    with tempfile.TemporaryFile(dir=directory) as one, tempfile.TemporaryFile(dir=directory) as other:
        one.write(b"x" * 4096)
        one.flush()
        try:
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
        except OSError:
            return False
    return True


def _can_overlay(directory: Path) -> bool:
    """Whether a directory there can take the changes of an overlay (another overlay cannot), and mounts are allowed."""
    with tempfile.TemporaryDirectory(dir=directory) as probe:
        lower, upper, work, at = layers = [Path(probe, name) for name in ("lower", "upper", "work", "at")]
        for layer in layers:
            layer.mkdir()
        (lower / "file").touch()
        command = [*Tree(at, Overlay(lower, upper, work)).mounting(), "rm", str(at / "file")]
        try:
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PROBE_PATIENCE)
        except (OSError, subprocess.SubprocessError):
            return False
    return True


def _in_namespace(options: str, target: Path) -> list[str]:
    # Without root the mount needs a user namespace, in which this user's files belong to root.
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ["unshare", *user, "--mount", "--", "sh", "-c", _MOUNT, "sh", options, str(target)]
