"""Which of the host's paths may be shown in a sandbox: never all of it, and a home only where that is said."""

from __future__ import annotations

import contextlib
import difflib
import os
import pwd
from pathlib import Path

# Where the kernel tells of the host, and where its sockets are: a Docker socket in a sandbox is a way out of it.
_NEVER = ("/dev", "/proc", "/run", "/sys", "/var/run")


def checked_path(text: str, *, whole_home: bool = False) -> Path:
    """The absolute path that ``text`` names, ``~`` expanded and links followed.

    Raises ``ValueError`` in words for its author: for a relative path, ``/`` or a folder above a home, a folder of the
    kernel or of sockets, a whole home without ``whole_home``, and what does not exist.
    """
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{text!r} must be absolute, or begin with ~")
    path = Path(os.path.normpath(path))
    # Links of the kernel cannot be followed by everybody.
    real = path if _forbidden(path) else Path(os.path.realpath(path))
    if (inside := _forbidden(real)) is not None:
        raise ValueError(f"{text!r} lies in {inside}, which sandboxes never show: it leads to the host")
    if real == Path("/") or any(real in home.parents for home in _homes()):
        raise ValueError(f"{text!r} holds whole homes; name the folders below it that are needed")
    if real in _homes() and not whole_home:
        raise ValueError(f"{text!r} is a whole home, with keys in it; name folders in it, or add whole_home = true")
    if not real.exists():
        raise ValueError(f"{text!r} does not exist{_nearest(path)}")
    return real


def _nearest(path: Path) -> str:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {str(path.parent / found[0])!r}?" if found else ""


def _homes() -> set[Path]:
    """The homes of this user: by ``HOME`` and by the system's list of users."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a container may run as a user that it does not list
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {Path(os.path.realpath(home)) for home in homes if home and home != "/"}


def _forbidden(path: Path) -> str | None:
    return next((each for each in _NEVER if path == Path(each) or Path(each) in path.parents), None)
