"""The sandbox of a task: a folder that is ``/``, with this machine's programs and settings read-only over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.environments.workspace import places
from openhands_rl_plugin.environments.workspace.bubblewrap import isolate
from openhands_rl_plugin.environments.workspace.places import remove
from openhands_rl_plugin.environments.workspace.sandbox import search_path
from openhands_rl_plugin.environments.workspace.visible import (
    interpreter_mounts,
    interpreter_paths,
    is_system,
    program_mounts,
    system_mounts,
)

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class HarborSandbox:
    """``core`` of a container. ``mounts`` are triples of an option of bubblewrap, the host's path, and that inside;
    ``python`` is the prefix of the task's own interpreter.

    Before each start the places of all mounts are made real folders again: what ran in an earlier sandbox may have
    made them links, which bubblewrap would follow on the host. No earlier one may still run.
    """

    def __init__(
        self,
        root: Path,
        workdir: str,
        mounts: Sequence[tuple[str, str, str]],
        *,
        state: str,
        network: bool = False,
        python: Path | None = None,
    ) -> None:
        self.workspace = workdir
        self.home = "/root"
        self.state = state
        self._root, self._mounts, self._network = root, mounts, network
        self._pythons = () if python is None else (str(python),)

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """``command`` behind ``bwrap`` and its mounts. Raises ``ConfigError`` where there is no bubblewrap."""
        _restore_links(self._root)
        for inside in ("/dev", "/etc", "/proc", "/run", *program_mounts(links=False)[2::3]):
            clear_way(self._root, inside)
        for path in (*interpreter_paths(), *self._pythons):
            clear_way(self._root, path if os.path.realpath(path) == path else os.path.dirname(path))
            if os.path.realpath(path) != path:
                remove(f"{self._root}{path}")
        for _, host, inside in self._mounts:
            clear_way(self._root, inside, folder=os.path.isdir(host))
        root = ("--bind", str(self._root), "/", *system_mounts(network=self._network, links=False))
        return [
            *isolate(root, network=self._network, options=("--as-pid-1",)),
            *interpreter_mounts(packages=False, closed=True, others=self._pythons),
            *(part for mount in self._mounts for part in mount),
            *("--chdir", "/", "--"),
            *command,
        ]

    def to_inside(self, text: str) -> str:
        """``text`` unchanged: inside, nothing has another name."""
        return text

    def from_inside(self, text: str) -> str:
        """``text`` unchanged."""
        return text


def clear_way(root: Path, inside: str, *, folder: bool = True) -> None:
    """As in ``places``, where ``inside`` is not below a mount of the system."""
    first, _, rest = inside.strip("/").partition("/")
    if not (rest and is_system(first)):
        places.clear_way(root, inside, folder=folder)


def _restore_links(root: Path) -> None:
    """The system's links in ``/`` (``/bin``), as they are here: a folder of that name would hold other programs."""
    os.chmod(root, 0o755)
    for entry in os.scandir("/"):
        if is_system(entry.name) and entry.is_symlink():
            place, target = os.path.join(root, entry.name), os.readlink(entry.path)
            if not os.path.islink(place) or os.readlink(place) != target:
                remove(place)
                os.symlink(target, place)


def read_only_path(shown: Sequence[str]) -> str:
    """The parts of the search path that nothing inside can write: the system's, and those in the mounts ``shown``."""
    fixed = [*shown, *interpreter_paths()]
    parts = [*search_path().split(":"), *_SYSTEM_PATH.split(":")]
    kept = [
        part
        for part in map(os.path.normpath, parts)
        if is_system(part.lstrip("/").partition("/")[0]) or any(f"{part}/".startswith(f"{each}/") for each in fixed)
    ]
    return ":".join(dict.fromkeys(kept))
