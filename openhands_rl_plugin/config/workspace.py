"""``[rl.workspace]``: where commands of OpenHands run, what they see, and whether they have a network."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from openhands_rl_plugin.config.fields import Settings

# Where the kernel tells of the host, and where its sockets are: a Docker socket in a sandbox is a way out of it.
_NEVER = ("/dev", "/proc", "/run", "/sys", "/var/run")


def checked_path(text: str) -> Path:
    """The absolute path that ``text`` names, ``~`` expanded and links followed.

    Raises ``ValueError`` in words for its author: for a relative path, ``/``, a home or a folder above one, a folder of
    the kernel or of sockets, and what does not exist.
    """
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{text!r} must be absolute, or begin with ~")
    path = Path(os.path.normpath(path))
    # Links of the kernel cannot be followed by everybody.
    real = path if _forbidden(path) else Path(os.path.realpath(path))
    if (inside := _forbidden(real)) is not None:
        raise ValueError(f"{text!r} lies in {inside}, which sandboxes never show: it leads to the host")
    if any(real in (home, *home.parents) for home in _homes()):
        raise ValueError(
            f"{text!r} is or holds a whole home, with keys in it; name the folders below it that are needed"
        )
    if not real.exists():
        raise ValueError(f"{text!r} does not exist")
    return real


def _homes() -> set[Path]:
    """The homes of this user: by ``HOME`` and by the system's list of users."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a container may run as a user that it does not list
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {Path(os.path.realpath(home)) for home in homes if home and home != "/"}


def _forbidden(path: Path) -> str | None:
    return next((each for each in _NEVER if path == Path(each) or Path(each) in path.parents), None)


PromptName = Literal["standard", "compact"]


class WorkspaceSettings(Settings):
    """``[rl.workspace]``: the sandbox of an agent that works on files. Sizes are in MiB, and of a whole session."""

    isolation: Literal["bubblewrap", "none"] = Field(
        default="bubblewrap",
        description="none: commands run with all rights of this user, where there is no bubblewrap",
    )
    prompt: PromptName = Field(
        default="standard",
        description="compact: RLAgent's own short instructions and tools (under 700 tokens), for small models",
    )
    visible: tuple[str, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may read, by their own paths"
    )
    writable: tuple[str, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may change"
    )
    network: bool = Field(default=False, description="let commands use the host's network")
    memory: int = Field(default=8192, ge=64, description="MiB of memory of all processes of a session")

    @property
    def is_compact(self) -> bool:
        """Whether the agent gets the short instructions."""
        return self.prompt == "compact"

    @property
    def visible_paths(self) -> tuple[Path, ...]:
        """``visible`` as real paths."""
        return tuple(checked_path(text) for text in self.visible)

    @property
    def writable_paths(self) -> tuple[Path, ...]:
        """``writable`` as real paths."""
        return tuple(checked_path(text) for text in self.writable)

    @field_validator("visible", "writable")
    @classmethod
    def _check_paths(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            checked_path(text)
        return texts
