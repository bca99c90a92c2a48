"""Paths inside an unpacked image: links lead where they lead for a program in it, never out of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError

_MOST_LINKS = 40
_MOST_OF_A_FILE = 2**20
_NUMBER = re.compile(r"\d{1,9}")


def inside(root: Path, path: str) -> Path | None:
    """The place on the host of ``path`` in the image at ``root``, without a link in it; ``None``: it is not there.

    Nobody may write to ``root`` meanwhile.
    """
    parts, place, links = path.split("/")[::-1], root, 0
    while parts:
        part = parts.pop()
        if part == "..":
            place = root if place == root else place.parent
        elif part not in ("", "."):
            following = place / part
            if following.is_symlink():
                links += 1
                target = os.readlink(following)
                if links > _MOST_LINKS:
                    return None
                parts += target.split("/")[::-1]
                place = root if target.startswith("/") else place
            elif os.path.lexists(following):
                place = following
            else:
                return None
    return place


def read_inside(root: Path, path: str) -> str:
    """The text of a file of the image; empty where there is none."""
    found = inside(root, path)
    if found is None or not found.is_file():
        return ""
    with found.open("rb") as file:
        return file.read(_MOST_OF_A_FILE).decode("utf-8", "replace")


def user_ids(root: Path, user: str) -> tuple[int, int, str]:
    """The numbers of user and group, and the home, that an image's ``USER`` means: ``name``, ``1000`` or
    ``name:group``; empty is root. Raises ``ConfigError`` for a user that the image does not know.
    """
    name, _, group = user.partition(":")
    entries = [line.split(":") for line in read_inside(root, "/etc/passwd").splitlines() if line.count(":") >= 6]
    name = name or "0"
    entry = next((each for each in entries if name in (each[0], each[2])), None)
    if entry is None and not _NUMBER.fullmatch(name):
        raise ConfigError(f"the image's user {user!r} is not in its /etc/passwd")
    uid, gid, home = (entry[2], entry[3], entry[5]) if entry else (name, "0", "/root" if name == "0" else "/")
    if group:
        groups = [line.split(":") for line in read_inside(root, "/etc/group").splitlines() if line.count(":") >= 3]
        gid = next((each[2] for each in groups if group in (each[0], each[2])), group)
    if not (_NUMBER.fullmatch(uid) and _NUMBER.fullmatch(gid)):
        raise ConfigError(f"the image's user {user!r} is not in its /etc/passwd and /etc/group")
    return int(uid), int(gid), home or "/"
