"""A copy of a session in bubblewrap: of its files, of ``/tmp`` and of its shell's state."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace.copies import (
    METHODS,
    ForkLimits,
    ForkMethod,
    Tree,
    copy_tree,
    fork_tree,
    remove_tree,
)
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, Sandbox, SandboxLimits
from openhands_rl_plugin.environments.workspace.shell import Shell

TEMPORARY = "/tmp"


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
    private = Path(tempfile.mkdtemp(prefix="openhands-rl-fork-")).resolve()
    new: Shell | None = None
    try:
        forked = fork_tree(tree, private, limits=limits, methods=methods, stop=stop)
        over = sandbox.over(forked.directory, forked.mounting())
        new = Shell(over, variables, bounds, start=stands.cwd)
        copy_temporary(shell.path_from_host(TEMPORARY), new, over, limits=limits, stop=stop)
    except BaseException:
        if new is not None:
            new.close()
        remove_tree(private)
        raise
    return SessionFork(private, forked, over, new)


def copy_temporary(
    source: Path,
    new: Shell,
    sandbox: BubblewrapSandbox,
    *,
    limits: ForkLimits,
    stop: threading.Event,
    without: frozenset[str] = frozenset(),
) -> None:
    """Copy a session's ``/tmp`` into that of ``new``, but for what the sandbox itself has there and ``without``."""
    left_out = sandbox.host_names_in_tmp | without
    copy_tree(source, new.path_from_host(TEMPORARY), limits=limits, stop=stop, leave_out=left_out)


def changes_in(baseline: Baseline, tree: Tree, sandbox: Sandbox) -> JsonObject:
    """What differs from the start of a session, or of the one that it is a copy of. Blocks."""
    if tree.overlay is not None and isinstance(sandbox, BubblewrapSandbox):
        sandbox = sandbox.over(tree.directory, tree.mounting(read_only=True))
    return baseline.changes(sandbox, copied=tree.method in ("reflink", "copy"))
