"""The place of one episode: a directory of the host that its session works in, and what it sees beside it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen


class PlaceMount(Frozen):
    """A directory or file of the host that the session sees, read-only, under another name."""

    host: Path
    inside: str


class Place(Frozen):
    """Where an episode with a repository of its own is played; of the host it shows the system's programs only.

    ``root`` is ``/workspace`` inside. ``repository`` is the name of the directory below it in which the session begins
    and whose changes are evidence; empty for the root itself. ``mounts`` and ``variables`` are what its programs need.
    """

    root: Path
    repository: str = ""
    mounts: tuple[PlaceMount, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
