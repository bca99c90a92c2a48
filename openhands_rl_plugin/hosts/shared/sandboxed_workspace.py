"""A folder in bubblewrap as ``[rl.workspace]`` says, with a shell, its evidence, and copies of all of it for search."""

from __future__ import annotations

import atexit
import copy
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from openhands_rl_plugin.config.workspace import WorkspaceSettings
from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.files import remove_tree, temporary_folder
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.bounds import kill_all, processes
from openhands_rl_plugin.environments.workspace.copies import ForkLimits, Tree
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import (
    INSIDE,
    BubblewrapSandbox,
    SandboxLimits,
    check_bubblewrap,
)
from openhands_rl_plugin.environments.workspace.session_fork import (
    TEMPORARY,
    changes_in,
    check_in,
    copy_temporary,
    fork_session,
)
from openhands_rl_plugin.environments.workspace.shell import CommandResult, Shell
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.environments.workspace.visible import HostPaths

_OUTPUT = 2 * 1024**2
_LIMITS = ForkLimits()


class SandboxedWorkspace:
    """The workspace of one session at ``/workspace``, whatever the folder's place on the host. All methods block.

    ``task``: the folder is that of a task, with its own mounts and variables. ``protected``: as in ``Baseline``. The
    constructor records the folder's content as the start; it raises ``ConfigError`` where bubblewrap does not work.
    """

    forks = True
    inside = INSIDE

    def __init__(
        self,
        folder: Path,
        settings: WorkspaceSettings,
        *,
        task: TaskWorkspace | None = None,
        variables: Mapping[str, str] | None = None,
        protected: Sequence[str] = (),
    ) -> None:
        check_bubblewrap()
        self._protected = protected
        root = (task.root if task is not None else folder).resolve()
        within = task.repository if task is not None else ""
        self._limits = limits_of(settings).model_copy(update={"output": _OUTPUT})
        self._variables = {**(variables or {}), **(task.variables if task is not None else {})}
        self._sandbox = BubblewrapSandbox(
            root,
            network=settings.network,
            temporary=self._limits.temporary,
            task_workspace=task,
            paths=paths_of(settings),
        )
        self.start = f"{INSIDE}/{within}" if within else INSIDE
        self._tree = Tree(root)
        self._evidence: JsonObject | None = None
        self._use(temporary_folder("workspace"), self._new_shell(self.start))
        self._within = within
        self._remember("start")

    def begin(self) -> None:
        """What is evidence begins now, where ``conclude`` has ended what was before."""
        if self._evidence is not None:
            self._remember(f"start-{uuid.uuid4().hex}")

    def _remember(self, name: str) -> None:
        recorded = self.private / name
        recorded.mkdir(mode=0o700)
        self._evidence = None
        self._baseline = Baseline(recorded, self._within, self._protected)
        self._baseline.remember(self._sandbox)

    def run(self, command: str, *, timeout: float | None, keep: bool = True) -> CommandResult:
        """As ``Shell.run``."""
        return self._shell.run(command, timeout=timeout, keep=keep)

    def files(self, below: str) -> Workspace:
        """Access to the files below ``/workspace``, or ``/tmp``, whose names begin with ``/workspace`` there, too."""
        if below == INSIDE and self._tree.overlay is None:
            return Workspace(self._tree.directory)
        return Workspace(self._shell.path_from_host(below))

    def interrupt(self) -> None:
        """Send Ctrl-C (SIGINT) to the command that is running, and to what it started in the foreground."""
        # The first process of the sandbox, as this machine calls it.
        first, table = int(self._shell.path_from_host("/").parts[2]), processes()
        own = [pid for pid, (parent, *_) in table.items() if parent == first and self._sandbox.state in _arguments(pid)]
        kill_all((pid for pid, (_, session, *_) in table.items() if session in own), signal.SIGINT)

    def restart(self) -> None:
        """End all processes, and go on with a new shell in the session's first folder. Files stay, in ``/tmp`` too."""
        old, self._shell = self._shell, self._new_shell(self.start)
        # Nothing may run while the host copies, or a link could come in a folder's place: whoever holds a folder in
        # memory keeps it beyond the end of its sandbox.
        with suppress(InfrastructureError, BadEnvironmentError), _held(old.path_from_host(TEMPORARY)) as source:
            old.close()
            own = frozenset({Path(self._sandbox.state).parent.name})
            copy_temporary(source, self._shell, self._sandbox, limits=_LIMITS, stop=threading.Event(), without=own)
        old.close()

    def fork(self, stop: threading.Event) -> Self:
        """Copies of the files and of the shell's state. The caller closes it; until then this one must not change.

        Raises as ``fork_session`` does.
        """
        forked = fork_session(
            self._tree,
            self._sandbox,
            self._shell,
            variables=self._variables,
            bounds=self._limits,
            limits=_LIMITS,
            stop=stop,
        )
        twin = copy.copy(self)
        twin._tree, twin._sandbox, twin._evidence = forked.tree, forked.sandbox, None
        twin._use(forked.private, forked.shell)
        return twin

    def changes(self) -> JsonObject:
        """The changes since the session began: a patch and the names of the files."""
        return changes_in(self._baseline, self._tree, self._sandbox, self._shell)

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """The changes, and no failure. A second call returns the same."""
        if self._evidence is None:
            self._evidence = self.changes()
        return self._evidence, None

    def check(self, asked: WorkspaceCommand, stop: threading.Event | None = None) -> CommandEvidence:
        """As ``check_in``."""
        session = (self._baseline, self._tree, self._sandbox, self._shell, self._variables, self._limits)
        return check_in(asked, *session, self.start, stop)

    def close(self) -> None:
        """End all processes and remove what is not the folder itself. Idempotent."""
        atexit.unregister(self.close)
        self._shell.close()
        remove_tree(self.private)

    def _use(self, private: Path, shell: Shell) -> None:
        self.private, self._shell = private, shell
        atexit.register(self.close)

    def _new_shell(self, start: str) -> Shell:
        return Shell(self._sandbox, self._variables, self._limits, start=start)


@contextmanager
def _held(folder: Path) -> Iterator[Path]:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


_MEBIBYTE = 1024**2


def limits_of(settings: WorkspaceSettings) -> SandboxLimits:
    """The limits of a session."""
    return SandboxLimits(
        memory=settings.memory * _MEBIBYTE,
        processes=settings.processes,
        temporary=settings.temporary * _MEBIBYTE,
        disk=settings.disk * _MEBIBYTE,
    )


def paths_of(settings: WorkspaceSettings) -> HostPaths:
    """The paths of the host that a session sees beside the system's."""
    return HostPaths(visible=settings.visible_paths, writable=settings.writable_paths)
