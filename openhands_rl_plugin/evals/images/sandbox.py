"""Programs in an image: its files as ``/`` of a bubblewrap sandbox, with a fresh writable layer on top.

The layer is an overlay where the kernel allows one, else a copy of the files, which shares their blocks where the file
system can. Nothing of the host is shown but an empty ``/dev`` and ``/proc``, and what a caller adds.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from openhands_rl_plugin.environments.workspace.bubblewrap import (
    Overlay,
    can_overlay,
    isolate,
    mount_overlays,
)
from openhands_rl_plugin.environments.workspace.inside import Bound, bounded
from openhands_rl_plugin.environments.workspace.places import clear_way
from openhands_rl_plugin.evals.images.paths import inside, read_inside, user_ids
from openhands_rl_plugin.evals.images.store import StoredImage
from openhands_rl_plugin.evals.swe.backends.caching import copy_tree
from openhands_rl_plugin.evals.swe.backends.sandbox import CAPABILITIES, InstanceLimits, Shown, bind

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
_RESOLV = "/etc/resolv.conf"


class FreshRoot(NamedTuple):
    """The files of an image with changes of their own. ``changes`` is the host's folder in which they are.

    Everything is below ``scratch``, which the caller removes when no program of it runs any more.
    """

    image: StoredImage
    scratch: Path
    root: Path
    changes: Path
    overlay: Overlay | None
    method: Literal["overlay", "copy"]

    @property
    def tmp(self) -> Path:
        """The folder that is ``/tmp``."""
        return self.scratch / "tmp"


async def fresh_root(image: StoredImage, scratch: Path) -> FreshRoot:
    """The image's files with a writable layer in ``scratch``, an empty folder. Raises ``InfrastructureError``."""
    root = scratch / "root"
    if await asyncio.to_thread(can_overlay, scratch.parent, image.root, scratch):
        upper, work = scratch / "upper", scratch / "work"
        for folder in (root, upper, work):
            folder.mkdir()
        made = FreshRoot(image, scratch, root, upper, Overlay(image.root, upper, work, root), "overlay")
    else:
        await copy_tree(image.root, root)
        made = FreshRoot(image, scratch, root, root, None, "copy")
    own = inside(image.root, "/tmp")
    if own is not None and own.is_dir():
        await copy_tree(own, made.tmp)
    else:
        made.tmp.mkdir()
    made.tmp.chmod(0o1777)
    # Engines write these names for every container.
    clear_way(made.changes, "/etc/hosts", folder=False)
    known = read_inside(image.root, "/etc/hosts")
    (made.changes / "etc/hosts").write_text(known if "localhost" in known else _HOSTS)
    return made


class ImageSandbox:
    """Command lines that run programs in a ``FreshRoot``."""

    def __init__(self, limits: InstanceLimits | None = None) -> None:
        self._limits = limits or InstanceLimits()

    def wrap(
        self,
        fresh: FreshRoot,
        program: Sequence[str],
        *,
        workdir: str = "",
        user: str | None = None,
        network: bool = False,
        shown: Sequence[Shown] = (),
        variables: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The command line that runs ``program`` with the image's ``ENV``, in ``workdir`` (empty: its ``WORKDIR``) and
        as ``user`` (``None``: its ``USER``). No earlier program of ``fresh`` may still run.

        Raises ``ConfigError`` for a user or a folder that the image does not have, or without bubblewrap.
        """
        config, limits = fresh.image.config, self._limits
        uid, gid, home = user_ids(fresh.image.root, config.user if user is None else user)
        workdir = workdir or config.workdir
        allowed = [word for name in CAPABILITIES for word in ("--cap-add", f"CAP_{name}")] if uid == 0 else []
        who = ["--unshare-user", "--uid", str(uid), "--gid", str(gid), "--hostname", "localhost"]
        mounts = [Shown(fresh.tmp, "/tmp", writable=True), *shown]
        if network:
            mounts.append(Shown(Path(_RESOLV).resolve(), _RESOLV))
        self._clear(fresh, mounts)
        if inside(fresh.image.root, workdir) is None:
            clear_way(fresh.changes, workdir)  # engines make it, too
        settings = {"PATH": _PATH, "HOME": home, **config.env, **(variables or {})}
        command = [
            *mount_overlays([fresh.overlay] if fresh.overlay else []),
            *("prlimit", f"--data={limits.memory}", f"--fsize={limits.file}", "--core=0", "--"),
            *isolate(["--bind", str(fresh.root), "/"], network=network, options=[*who, "--die-with-parent", *allowed]),
            *(word for each in mounts for word in bind(each)),
            *("--clearenv", *(word for pair in settings.items() for word in ("--setenv", *pair))),
            *("--chdir", workdir, "--", *program),
        ]
        bound = Bound(
            processes=limits.processes,
            memory=limits.memory,
            disk=limits.disk,
            folder=str(fresh.changes),
            also=str(fresh.tmp),
            isolated=False,
        )
        # The image may have no Python, so that what counts stands outside.
        return bounded(bound, sys.executable, command)

    @staticmethod
    def _clear(fresh: FreshRoot, mounts: Sequence[Shown]) -> None:
        """Make the places of all mounts: bubblewrap would follow a link there on the host."""
        for place in ("/dev", "/proc"):
            clear_way(fresh.changes, place)
        for each in mounts:
            folder = each.host.is_dir()
            clear_way(fresh.changes, each.inside, folder=folder)
            if not folder:
                (fresh.changes / each.inside.lstrip("/")).touch()
