"""A copy of a session in bubblewrap: of its files, of ``/tmp`` and of its shell's state."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.files import remove_tree, scratch_folder, temporary_folder
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace.check import check_workspace
from openhands_rl_plugin.environments.workspace.copies import (
    METHODS,
    ForkLimits,
    ForkMethod,
    Tree,
    copy_tree,
    fork_tree,
)
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import (
    BubblewrapSandbox,
    Sandbox,
    SandboxLimits,
    SubprocessSandbox,
)
from openhands_rl_plugin.environments.workspace.shell import Shell

TEMPORARY = "/tmp"
# What the session left is not copied so slowly that nobody judges it.
_CHECKED = ForkLimits(seconds=600)


@dataclass(frozen=True)
class SessionFork:
    """The copy. ``private`` holds the files; its owner closes the shell and removes the folder."""

    private: Path
    tree: Tree
    sandbox: BubblewrapSandbox
    shell: Shell

    def close(self) -> None:
        """End its processes and remove its files."""
        self.shell.close()
        remove_tree(self.private)


def fork_session(
    tree: Tree,
    sandbox: BubblewrapSandbox,
    shell: Shell,
    *,
    variables: Mapping[str, str],
    bounds: SandboxLimits,
    limits: ForkLimits,
    stop: threading.Event,
    methods: Sequence[ForkMethod] = METHODS,
) -> SessionFork:
    """Copy a session, which must not change until the copy is given up. Blocks.

    ``variables`` and ``bounds`` are those of its shell. Raises ``BadEnvironmentError`` when processes run or the
    workspace cannot be copied, ``InfrastructureError`` when copying fails or ``stop`` is set meanwhile.
    """
    stands = shell.snapshot()
    if stands.processes:
        raise BadEnvironmentError(
            f"the workspace cannot be forked while processes run in it ({', '.join(stands.processes)}): they cannot be "
            "copied; end them, or use a strategy that needs no forks"
        )
    private = temporary_folder("fork")
    new: Shell | None = None
    try:
        forked = fork_tree(tree, private, limits=limits, methods=methods, stop=stop)
        over = sandbox.over(forked.directory, forked.mounting())
        new = Shell(over, variables, bounds, start=stands.cwd)
        held, copied = shell.path_from_host(TEMPORARY), new.path_from_host(TEMPORARY)
        copy_tree(held, copied, limits=limits, stop=stop, leave_out=over.host_names_in_tmp)
    except BaseException:
        if new is not None:
            new.close()
        remove_tree(private)
        raise
    return SessionFork(private, forked, over, new)


def changes_in(baseline: Baseline, tree: Tree, sandbox: Sandbox, shell: Shell | None = None) -> JsonObject:
    """What differs from the start of a session, or of the one that it is a copy of. Its processes rest. Blocks."""
    if tree.overlay is not None and isinstance(sandbox, BubblewrapSandbox):
        sandbox = sandbox.over(tree.directory, tree.mounting(read_only=True))
    with _at_rest(tree, shell):
        return baseline.changes(sandbox, copied=tree.method == "copy")


def check_in(
    asked: WorkspaceCommand,
    baseline: Baseline,
    tree: Tree,
    sandbox: Sandbox,
    shell: Shell | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    bounds: SandboxLimits | None = None,
    start: str | None = None,
    stop: threading.Event | None = None,
) -> CommandEvidence:
    """Run a command over a copy of a session's workspace, with the protected files as they were at its start.

    The session's processes rest meanwhile. Without isolation and protected files it is run in the workspace itself.
    ``variables`` and ``bounds`` are those of the session's shell, ``start`` is as in ``check_workspace``. Blocks.
    """
    isolated = isinstance(sandbox, BubblewrapSandbox)
    with _at_rest(tree, shell), scratch_folder("check") as private:
        try:
            if isolated or asked.protected:
                methods = METHODS if isolated else METHODS[1:]
                copied = fork_tree(tree, private, limits=_CHECKED, methods=methods, stop=stop, live=isolated)
                if isinstance(sandbox, BubblewrapSandbox):
                    again = sandbox.over(copied.directory, copied.mounting())
                else:
                    again = SubprocessSandbox(copied.directory, private)
                if asked.protected:
                    baseline.restore(again, asked.protected)
            else:
                again = SubprocessSandbox(tree.directory, private)
        except (BadEnvironmentError, InfrastructureError) as error:
            who = "prevented" if isinstance(error, BadEnvironmentError) else "error"
            return asked.did(**{who: str(error)})
        return check_workspace(asked, again, variables, bounds or SandboxLimits(), start=start)


@contextmanager
def _at_rest(tree: Tree, shell: Shell | None) -> Iterator[None]:
    """Nothing of the session runs inside the block, and its folder is open to its owner."""
    with shell.held() if shell else nullcontext():
        for folder in (tree.directory, *((tree.overlay.upper,) if tree.overlay else ())):
            with suppress(OSError):
                folder.chmod(stat.S_IMODE(folder.lstat().st_mode) | stat.S_IRUSR | stat.S_IXUSR)
        yield
