"""A session's workspace by ``[rl.workspace]``: folder, shell and evidence; with bubblewrap also forks for search."""

from __future__ import annotations

import atexit
import copy
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from openhands_rl_plugin.config.rl import WorkspaceSettings, checked_path
from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.files import remove_tree, scratch_folder, temporary_folder
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.copies import FORK_SECONDS, Tree, copy_tree, fork_tree
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import (
    BubblewrapSandbox,
    SandboxLimits,
    SubprocessSandbox,
    check_bubblewrap,
)
from openhands_rl_plugin.environments.workspace.shell import CommandResult, Shell, check_workspace
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace

TEMPORARY = "/tmp"
_MEBIBYTE = 1024**2
# What the session left is not copied so slowly that nobody judges it.
_CHECKING_SECONDS = 600.0

ENDED = "[The sandbox ended and a new one is started: background processes and the shell's state are lost.]"
NO_NULL = "A command cannot hold a null character."


def earlier_output(result: CommandResult) -> str:
    """A prefix of a command's output: the output of background processes since the last command."""
    if not result.earlier:
        return ""
    return f"[Output of background processes since the last command.]\n{result.earlier}\n[Output of this command.]\n"


class SandboxedWorkspace:
    """The workspace of one session, at ``/workspace``, or without isolation at its own path. All methods block.

    ``folder``: by default one that is removed with it. ``task``: the folder is that of a task, with its own mounts and
    variables. ``protected``: as in ``Baseline``. Without isolation it cannot be forked. ``output``:
    bytes of one command's output that are kept. ``seconds``: the time limit of a command that names none, which its
    host reads. The folder's content is recorded as the start.
    Raises ``ConfigError`` where bubblewrap does not work.
    """

    # As the SDK's for silence.
    seconds = 30.0
    fork_seconds = FORK_SECONDS
    overlay = True

    _sandbox: BubblewrapSandbox | SubprocessSandbox

    def __init__(
        self,
        folder: Path | None,
        settings: WorkspaceSettings,
        *,
        task: TaskWorkspace | None = None,
        protected: Sequence[str] = (),
        output: int = SandboxLimits().output,
    ) -> None:
        self.forks = settings.isolation != "none"
        if self.forks:
            check_bubblewrap()
        private = temporary_folder("workspace")
        self._protected = protected
        self._limits = SandboxLimits(memory=settings.memory * _MEBIBYTE, output=output)
        self.variables = dict(task.variables) if task is not None else {}
        root = (task.root if task is not None else folder or private / "workspace").expanduser().resolve()
        root.mkdir(parents=True, exist_ok=True)
        if self.forks:
            self._sandbox = BubblewrapSandbox(
                root,
                network=settings.network,
                temporary=self._limits.temporary,
                task_workspace=task,
                visible=[*map(checked_path, settings.visible)],
                writable=[*map(checked_path, settings.writable)],
            )
        else:
            self._sandbox = SubprocessSandbox(root, private)
        self._within = task.repository if task is not None else ""
        self.inside = self._sandbox.workspace
        self.start = f"{self.inside}/{self._within}" if self._within else self.inside
        self._tree = Tree(root)
        self._evidence: JsonObject | None = {}
        self._use(private, self._new_shell())
        self.begin()

    def begin(self) -> None:
        """Start to record changes as evidence, unless recording runs until ``conclude``."""
        if self._evidence is None:
            return
        recorded = self.private / f"start-{uuid.uuid4().hex}"
        recorded.mkdir(mode=0o700)
        self._evidence = None
        self._baseline = Baseline(recorded, self._within, self._protected)
        self._baseline.remember(self._sandbox)

    def run(self, command: str, *, timeout: float | None, cwd: str | None = None, keep: bool = True) -> CommandResult:
        """As ``Shell.run``."""
        return self._shell.run(command, timeout=timeout, cwd=cwd, keep=keep)

    @property
    def files(self) -> Shell:
        """The shell, for the files that commands see."""
        return self._shell

    def interrupt(self) -> None:
        """As ``Shell.interrupt``."""
        self._shell.interrupt()

    def restart(self) -> None:
        """End all processes, and go on with a new shell in the session's first folder. ``/tmp`` is empty then."""
        self._shell.close()
        self._shell = self._new_shell()

    def fork(self) -> Self:
        """Copies of the files, of ``/tmp`` and of the shell's state. The caller closes it; until then this one must not
        change.

        Raises ``BadEnvironmentError`` when processes run or the workspace cannot be copied, ``InfrastructureError``
        when copying fails.
        """
        assert isinstance(self._sandbox, BubblewrapSandbox), "only a workspace in bubblewrap can be forked"
        cwd, running = self._shell.snapshot()
        if running:
            raise BadEnvironmentError(
                f"the workspace cannot be forked while processes run in it ({', '.join(running)}): they "
                "cannot be copied; end them, or use a strategy that needs no forks"
            )
        twin, private, seconds = copy.copy(self), temporary_folder("fork"), self.fork_seconds
        new: Shell | None = None
        try:
            tree = twin._tree = fork_tree(self._tree, private, seconds=seconds, overlay=self.overlay)
            sandbox = twin._sandbox = self._sandbox.over(tree.directory, tree.mounting())
            new = Shell(sandbox, self.variables, self._limits, start=cwd)
            temporary = self._shell.path_from_host(TEMPORARY), new.path_from_host(TEMPORARY)
            copy_tree(*temporary, seconds=seconds, leave_out=sandbox.host_names_in_tmp)
        except BaseException:
            if new is not None:
                new.close()
            remove_tree(private)
            raise
        twin._evidence = None
        twin._use(private, new)
        return twin

    def changes(self) -> JsonObject:
        """The changes since the session began: a patch and the names of the files. Its processes rest meanwhile."""
        tree, sandbox = self._tree, self._sandbox
        if tree.overlay is not None and isinstance(sandbox, BubblewrapSandbox):
            sandbox = sandbox.over(tree.directory, tree.mounting(read_only=True))
        with self._at_rest():
            return self._baseline.changes(sandbox, copied=tree.method == "copy")

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """The changes, and no failure. A second call returns the same."""
        if self._evidence is None:
            self._evidence = self.changes()
        return self._evidence, None

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over a copy of the workspace, with the protected files as they were at the session's start.

        The session's processes rest meanwhile. Without isolation and protected files it is run in the workspace itself.
        """
        with self._at_rest(), scratch_folder("check") as private:
            tree, sandbox = self._tree, self._sandbox
            try:
                if self.forks or asked.protected:
                    how = {"overlay": self.forks, "live": self.forks}
                    tree = fork_tree(tree, private, seconds=_CHECKING_SECONDS, **how)
                isolated = isinstance(sandbox, BubblewrapSandbox)
                directory, around = tree.directory, tree.mounting()
                again = sandbox.over(directory, around) if isolated else SubprocessSandbox(directory, private)
                if asked.protected:
                    self._baseline.restore(again, asked.protected)
            except (BadEnvironmentError, InfrastructureError) as error:
                who = "prevented" if isinstance(error, BadEnvironmentError) else "error"
                return asked.did(**{who: str(error)})
            return check_workspace(asked, again, self.variables, self._limits, start=self.start)

    def close(self) -> None:
        """End all processes and remove what is not the folder itself. Idempotent."""
        atexit.unregister(self.close)
        self._shell.close()
        remove_tree(self.private)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Stop the session's processes inside the block, and make its folder accessible to its owner."""
        shell = self._shell
        shell.hold(True)
        try:
            for folder in (self._tree.directory, *((self._tree.overlay.upper,) if self._tree.overlay else ())):
                with suppress(OSError):
                    folder.chmod(stat.S_IMODE(folder.lstat().st_mode) | stat.S_IRUSR | stat.S_IXUSR)
            yield
        finally:
            shell.hold(False)

    def _use(self, private: Path, shell: Shell) -> None:
        self.private, self._shell = private, shell
        if self.forks:
            atexit.register(self.close)

    def _new_shell(self) -> Shell:
        return Shell(self._sandbox, self.variables, self._limits, start=self.start)
