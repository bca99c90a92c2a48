"""The workspace of one task: the host directory of its session, and the other paths that the session sees."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen


class ContainerPlace(Frozen):
    """Where a container of another program is, and how one command is run in it.

    Its owner listens at ``socket`` of this machine, in a folder that no other user reads. A connection is one command,
    a line ``{"command": text, "timeout": seconds or null}``, answered by ``{"return_code", "stdout", "stderr"}``, or by
    ``{"error"}`` where it could not be run. A command whose connection is closed is given up. ``folder`` is this
    session's own in the container.
    """

    socket: Path
    folder: str


class WorkspaceMount(Frozen):
    """A directory or file of the host that the session sees, read-only, under another name."""

    host: Path
    inside: str


class TaskWorkspace(Frozen):
    """The workspace of a task with its own repository; of the host, only the system's programs are visible.

    ``root`` is ``/workspace`` inside. ``repository`` is the name of the directory below it in which the session begins
    and whose changes are evidence; empty for the root itself. ``mounts`` and ``variables`` are for its programs.
    ``container``: the session works there instead, and nothing but its records is in ``root``.
    """

    root: Path
    repository: str = ""
    mounts: tuple[WorkspaceMount, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
    container: ContainerPlace | None = None
