"""The workspace of one task: the host directory of its session, and the other paths that the session sees."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen


class WorkspaceMount(Frozen):
    """A directory or file of the host that the session sees, read-only, under another name."""

    host: Path
    inside: str


class TaskWorkspace(Frozen):
    """The workspace of a task with its own repository; of the host, only the system's programs are visible.

    ``root`` is ``/workspace`` inside. ``repository`` is the name of the directory below it in which the session begins
    and whose changes are evidence; empty for the root itself. ``mounts`` and ``variables`` are for its programs.
    """

    root: Path
    repository: str = ""
    mounts: tuple[WorkspaceMount, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
