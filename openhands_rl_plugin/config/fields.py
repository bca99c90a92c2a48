"""The base class of the ``[rl]`` sections' models, the types of names, addresses and paths, and ``[rl.workspace]``."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _variable_name(value: str) -> str:
    if value and re.fullmatch(r"[A-Za-z_]\w*", value) is None:
        raise ValueError("must be the NAME of an environment variable, not the secret itself")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError('must be an http:// or https:// URL, for example "http://127.0.0.1:8100/v1"')
    return value.rstrip("/")


def _safe_name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None or ".." in value:
        raise ValueError("may hold letters, digits, '.', '_' and '-' only, and no '..'")
    return value


VariableName = Annotated[str, AfterValidator(_variable_name)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
SafeName = Annotated[str, AfterValidator(_safe_name)]


class Settings(BaseModel):
    """Base of the sections: frozen, strict about types (TOML has its own), no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


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
    homes = {"/", os.path.expanduser("~")}  # a container may have no other home
    with contextlib.suppress(KeyError):  # a container may run as a user that it does not list
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {Path(os.path.realpath(home)) for home in homes if home}


def _forbidden(path: Path) -> str | None:
    return next((each for each in _NEVER if path == Path(each) or Path(each) in path.parents), None)


def _host_path(text: str) -> str:
    checked_path(text)
    return text


HostPath = Annotated[str, AfterValidator(_host_path)]
"""As written; ``checked_path`` gives the path."""
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
    visible: tuple[HostPath, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may read, by their own paths"
    )
    writable: tuple[HostPath, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may change"
    )
    network: bool = Field(default=False, description="let commands use the host's network")
    memory: int = Field(default=8192, ge=64, description="MiB of memory of all processes of a session")

    @property
    def is_compact(self) -> bool:
        """Whether the agent gets the short instructions."""
        return self.prompt == "compact"
