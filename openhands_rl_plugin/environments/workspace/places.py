"""Makes the places of mounts in a folder that a sandbox wrote to, where links may lead to the host."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from openhands_rl_plugin.environments.workspace.copies import remove_tree


def clear_way(root: Path, inside: str, *, folder: bool = True) -> None:
    """Make ``inside``, and all above it, real folders below ``root``; a file's last part becomes a file or nothing.

    Nothing else may run in ``root`` meanwhile.
    """
    parts = [part for part in inside.split("/") if part]
    place = str(root)
    os.chmod(place, 0o755)
    for at, part in enumerate(parts):
        place = os.path.join(place, part)
        is_folder = folder or at + 1 < len(parts)
        mode = os.lstat(place).st_mode if os.path.lexists(place) else 0
        if mode and not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
            remove(place)
            mode = 0
        if is_folder and not mode:
            os.mkdir(place)
        elif is_folder and mode & 0o700 != 0o700:
            os.chmod(place, stat.S_IMODE(mode) | 0o700)


def remove(place: str) -> None:
    """Remove what is at ``place``, which may be a link, a file, a folder, or nothing."""
    if os.path.isdir(place) and not os.path.islink(place):
        remove_tree(Path(place))
    elif os.path.lexists(place):
        os.unlink(place)
