"""Sandboxes, in which a session's commands run: a plain subprocess, or bubblewrap.

Both kinds start the same supervisor (``supervisor.py``); they differ in the files that it can see. Nothing here changes
the current process (no ``chdir``, no environment variables), so sessions of one process do not affect each other.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import Field

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import empty_root, find_bubblewrap, isolate
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount
from openhands_rl_plugin.environments.workspace.visible import (
    HostPaths,
    interpreter_mounts,
    interpreter_paths,
    system_mounts,
)

INSIDE = "/workspace"
"""The session's path of its workspace, independent of the directory on the host."""

_GIBIBYTE = 1024**3


def search_path() -> str:
    """``PATH`` for programs in a sandbox: the user's, then the folders that every sandbox shows: this interpreter's and
    the system's."""
    return f"{os.environ.get('PATH', os.defpath)}:{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"


class SandboxLimits(Frozen):
    """Limits of a session: bytes of memory and processes of all of it, bytes of one file, of ``/tmp`` and ``/dev/shm``,
    bytes that it may add to its workspace (``disk``), and bytes of one command's output that are kept (the middle is
    dropped).

    Memory and processes are bounded by a control group where one can be made; else the first process of the sandbox
    counts them, as it does the blocks of the workspace, ten times a second, and ends all others.
    """

    memory: int = Field(default=8 * _GIBIBYTE, ge=1)
    processes: int = Field(default=4096, ge=1)
    file: int = Field(default=4 * _GIBIBYTE, ge=1)
    temporary: int = Field(default=2 * _GIBIBYTE, ge=1)
    disk: int = Field(default=32 * _GIBIBYTE, ge=1)
    output: int = Field(default=28_000, ge=2)

    def as_rlimits(self) -> dict[str, int]:
        """By the names of the ``resource`` module."""
        return {"RLIMIT_DATA": self.memory, "RLIMIT_NPROC": self.processes, "RLIMIT_FSIZE": self.file, "RLIMIT_CORE": 0}


class Sandbox(Protocol):
    """How to start the supervisor, and the names by which commands and answers call the workspace. ``writable``: what
    a session may write to beside it."""

    isolated: bool
    workspace: str
    writable: tuple[str, ...]
    home: str
    state: str

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """The command line that runs ``command`` inside, where it also finds the host's directories ``shared``."""
        ...

    def to_inside(self, text: str) -> str:
        """Host paths of the workspace in ``text`` -> ``/workspace``."""
        ...

    def from_inside(self, text: str) -> str:
        """``/workspace`` in ``text`` -> the path that a command has to use."""
        ...


class SubprocessSandbox:
    """No isolation: commands see the host with the rights of this process. ``/workspace`` is a name only, replaced
    in commands and answers (not in files), so that prompts are the same as with bubblewrap.

    Raises ``ConfigError`` for a workspace whose path a shell would have to quote.
    """

    isolated = False

    def __init__(self, root: Path, private: Path) -> None:
        if shlex.quote(str(root)) != str(root):
            raise ConfigError(
                f"the workspace {str(root)!r} cannot be used without bubblewrap: rename it, without blanks"
            )
        self.workspace, self.writable = str(root), ()
        self.home = str(private / "home")
        self.state = str(private / "state" / "shell")
        self._host_path = re.compile(rf"{re.escape(self.workspace)}(?![\w.-])")

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """``command`` unchanged."""
        return list(command)

    def to_inside(self, text: str) -> str:
        """Host paths of the workspace in ``text`` -> ``/workspace``."""
        return self._host_path.sub(INSIDE, text)

    def from_inside(self, text: str) -> str:
        """``/workspace`` as a whole path component -> the host path."""
        return _INSIDE_PATH.sub(lambda _: self.workspace, text)


class BubblewrapSandbox:
    """The system's programs, this interpreter and the ``paths`` of the host, the workspace at ``/workspace``, private
    ``/tmp``, processes and devices, no capabilities, and no network but the host's where ``network`` asks for it.

    A ``task_workspace`` adds its own mounts, and takes this interpreter's packages away.
    """

    isolated = True

    def __init__(
        self,
        root: Path,
        *,
        network: bool = False,
        temporary: int = SandboxLimits().temporary,
        task_workspace: TaskWorkspace | None = None,
        paths: HostPaths | None = None,
    ) -> None:
        self.workspace = INSIDE
        self.home = "/tmp/home"
        self.state = "/tmp/.shell/state"
        self._root = str(root)
        self._bound = self._root
        self._around: tuple[str, ...] = ()
        self._network = network
        self._temporary = temporary
        self._task_workspace = task_workspace
        self._paths = paths or HostPaths()
        self.writable = tuple(map(str, self._paths.writable))

    def over(self, directory: Path, around: Sequence[str] = ()) -> BubblewrapSandbox:
        """This sandbox with another directory as the workspace; what it hides of the host stays hidden.

        ``around`` is a command that makes mounts and then executes its arguments.
        """
        twin = copy.copy(self)
        twin._bound, twin._around = str(directory), tuple(around)
        return twin

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """``command`` behind ``bwrap`` and its mounts. Raises ``ConfigError`` where there is no bubblewrap."""
        # Behind ``around`` this user may be root in a namespace of its own.
        user = ("--uid", str(os.getuid()), "--gid", str(os.getgid())) if self._around else ()
        mounts = [*empty_root(), *system_mounts(network=self._network)]
        options = ("--as-pid-1", *user)
        return [
            *self._around,
            *isolate(mounts, network=self._network, options=options, shared_memory=self._temporary),
            *("--size", str(self._temporary), "--tmpfs", "/tmp"),
            *interpreter_mounts(packages=self._task_workspace is None),
            *self._paths.mounts(),
            *(part for mount in self._mounts for part in ("--ro-bind", str(mount.host), mount.inside)),
            *("--bind", self._bound, INSIDE),
            *(part for path in shared for part in ("--bind", str(path), str(path))),
            *("--remount-ro", "/", "--chdir", INSIDE, "--"),
            *command,
        ]

    def to_inside(self, text: str) -> str:
        """``text`` unchanged: inside, the workspace has no other name."""
        return text

    def from_inside(self, text: str) -> str:
        """``text`` unchanged."""
        return text

    @property
    def host_names_in_tmp(self) -> frozenset[str]:
        """The names in ``/tmp`` that are not the session's own: mounts and the path of an interpreter there."""
        shown = {*interpreter_paths(), *map(str, self._paths.all), *(mount.inside for mount in self._mounts)}
        return frozenset(path.split("/")[2] for path in shown if path.startswith("/tmp/"))

    @property
    def _mounts(self) -> tuple[WorkspaceMount, ...]:
        """The task workspace's mounts; those of a part of the workspace show that part of this sandbox."""
        if self._task_workspace is None:
            return ()
        own = Path(self._root)
        return tuple(
            mount.model_copy(update={"host": Path(self._bound) / mount.host.relative_to(own)})
            if mount.host.is_relative_to(own)
            else mount
            for mount in self._task_workspace.mounts
        )


_INSIDE_PATH = re.compile(rf"(?<![\w./-]){INSIDE}(?![\w.-])")


def check_bubblewrap() -> None:
    """Raise ``ConfigError``, which names the alternative, unless sandboxes can be created here."""
    find_bubblewrap(otherwise=', or accept commands without isolation: [rl.workspace] isolation = "none"')
