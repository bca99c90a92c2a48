"""Bubblewrap as the place of the official scripts: a root of its own with the repository at ``/testbed``, conda's
place taken by the shim, and of the host what programs need and nothing more.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import (
    Overlay,
    can_overlay,
    empty_root,
    find_bubblewrap,
    isolate,
    mount_overlays,
)
from openhands_rl_plugin.environments.workspace.inside import Bound, bounded
from openhands_rl_plugin.environments.workspace.processes import Ended, run
from openhands_rl_plugin.environments.workspace.visible import (
    OF_A_PREFIX,
    prefix_mounts,
    program_mounts,
    settings_mounts,
)
from openhands_rl_plugin.evals.swe.backends import package_index, shim
from openhands_rl_plugin.evals.swe.backends.caching import copy_tree, remove
from openhands_rl_plugin.evals.swe.backends.interpreters import Interpreter, find_uv

ENVIRONMENTS = "/conda/envs"
CONDA = "/opt/miniconda3"
PARTS = {"conda": "/conda", "root": "/root", "testbed": "/testbed"}
"""The parts of a layer, and where the sandbox mounts them. Environments and uv's cache lie in one, as uv links files
within one mount only.
"""

_GIBIBYTE = 1024**3
_ROOT_SIZE = 256 * 1024**2
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
"""What root in a container may do, without anything that reaches mounts, devices or other processes' memory."""
_NETWORK_VARIABLES = re.compile(
    r"(?:(?:HTTPS?|ALL|NO|FTP)_PROXY|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE)", re.IGNORECASE
)
_AS_ROOT = ("--unshare-user", "--uid", "0", "--gid", "0")


class InstanceLimits(Frozen):
    """Limits in a sandbox: bytes of memory, processes with their threads, bytes added to ``/testbed`` and of one file.

    They are counted by the sandbox's first process, which ends all others, and for one process kept by the kernel.
    """

    memory: int = 16 * _GIBIBYTE
    processes: int = 8192
    disk: int = 64 * _GIBIBYTE
    file: int = 8 * _GIBIBYTE


class Room(NamedTuple):
    """The folders behind one sandbox. ``layer`` holds ``PARTS``; with an overlay, which is mounted in a namespace that
    ends with the sandbox, it is empty until then.
    """

    layer: Path
    tmp: Path
    overlay: Overlay | None = None


class Shown(NamedTuple):
    """A file or folder of the host and its name inside."""

    host: Path
    inside: str
    writable: bool = False


class InstanceSandbox:
    """Command lines that run a program in a room, for one interpreter."""

    def __init__(self, interpreter: Interpreter, exclude_newer: str, limits: InstanceLimits | None = None) -> None:
        self._interpreter = interpreter
        self._exclude_newer = exclude_newer
        self._limits = limits or InstanceLimits()
        self._uv = find_uv()

    def wrap(
        self,
        room: Room,
        program: Sequence[str],
        *,
        network: bool,
        setup: bool = False,
        logins: bool = True,
        shown: Sequence[Shown] = (),
        variables: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The command line that runs ``program`` in ``room``, in ``/testbed`` if that exists.

        ``setup``: with the user's package index, and its ``logins``.
        """
        parts = [(room.layer / name, inside) for name, inside in PARTS.items()]
        parts = [(host, inside) for host, inside in parts if room.overlay or host.exists()]
        has_testbed = any(inside == "/testbed" for _, inside in parts)
        settings = {**self._variables(network=network, setup=setup, logins=setup and logins), **(variables or {})}
        root = [*empty_root(_ROOT_SIZE), *program_mounts(), *settings_mounts()]
        mounts = [word for host, inside in parts for word in ("--bind", str(host), inside)]
        mounts += [*self._tools(setup=setup, logins=logins), *(word for each in shown for word in bind(each))]
        return [
            *as_root(room, self._limits, root, mounts, settings, network=network),
            *("--chdir", "/testbed" if has_testbed else "/", "--"),
            *bounded(self._bound(has_testbed), f"{CONDA}/host-python", program),
        ]

    def _bound(self, has_testbed: bool) -> Bound:
        limits, disk = self._limits, self._limits.disk if has_testbed else 0
        return Bound(processes=limits.processes, memory=limits.memory, disk=disk, folder="/testbed")

    def _tools(self, *, setup: bool, logins: bool) -> list[str]:
        folder = Path(shim.__file__).parent
        binds = [
            Shown(folder / "activate.sh", f"{CONDA}/bin/activate"),
            Shown(folder, f"{CONDA}/shim"),
            Shown(self._uv, f"{CONDA}/bin/uv"),
            *(_index_settings(logins) if setup else ()),
        ]
        host = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        links = {f"{CONDA}/host-python": str(host), f"{CONDA}/envs": ENVIRONMENTS}
        links |= {f"{CONDA}/shims/{name}": "../shim/programs.sh" for name in PROGRAMS}
        words = [word for each in binds for word in bind(each)]
        words += [word for inside, to in links.items() for word in ("--symlink", to, inside)]
        return [*prefix_mounts(dict.fromkeys(self._prefixes(), OF_A_PREFIX), closed=True), *words]

    def _prefixes(self) -> set[str]:
        return {os.path.realpath(prefix) for prefix in (self._interpreter.prefix, sys.base_prefix)}

    def _variables(self, *, network: bool, setup: bool, logins: bool) -> dict[str, str]:
        named = {name: value for name, value in os.environ.items() if network and _NETWORK_VARIABLES.fullmatch(name)}
        settings = {name: value for name, value in named.items() if logins or "@" not in value}
        settings |= package_index.variables(logins=logins) if setup else {}
        return {
            **settings,
            "HOME": "/root",
            "PATH": f"{CONDA}/bin:{_SYSTEM_PATH}",
            "TZ": "Etc/UTC",
            "DEBIAN_FRONTEND": "noninteractive",
            "SHIM_UV": f"{CONDA}/bin/uv",
            "SHIM_PYTHON": str(self._interpreter.program),
            "UV_LINK_MODE": "hardlink" if network else "copy",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_CACHE_DIR": "/conda/uv",
            **({"UV_EXCLUDE_NEWER": self._exclude_newer} if self._exclude_newer else {}),
            **({} if network else {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}),
            **git_settings({"safe.directory": "*", "protocol.file.allow": "always", "gc.auto": "0"}),
        }


def as_root(
    room: Room,
    limits: InstanceLimits,
    root: Sequence[str],
    mounts: Sequence[str],
    variables: Mapping[str, str],
    *,
    network: bool,
) -> list[str]:
    """The beginning of a command line that runs a program in ``room`` as root in a container. ``root``: the mounts of
    ``/``, below the others.
    """
    allowed = [word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}")]
    # ``localhost`` is a name that resolves without a network.
    options = [*_AS_ROOT, "--hostname", "localhost", "--die-with-parent", *allowed]
    return [
        *mount_overlays([room.overlay] if room.overlay else []),
        *("prlimit", f"--data={limits.memory}", f"--fsize={limits.file}", "--core=0", "--"),
        *isolate(root, network=network, options=options, variables=variables),
        *("--bind", str(room.tmp), "/tmp", *mounts),
    ]


def _index_settings(logins: bool) -> Iterator[Shown]:
    """The user's settings of the package index, and indexes that are folders."""
    yield from (Shown(file, inside) for file, inside in package_index.files(logins=logins))
    yield from (Shown(folder, str(folder)) for folder in package_index.folders() if str(folder) != CONDA)


def git_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of git as environment variables."""
    numbered = list(enumerate(settings.items()))
    keys = {f"GIT_CONFIG_KEY_{at}": name for at, (name, _) in numbered}
    values = {f"GIT_CONFIG_VALUE_{at}": value for at, (_, value) in numbered}
    return {"GIT_CONFIG_COUNT": str(len(settings)), **keys, **values}


def check_bubblewrap() -> None:
    """Raise ``ConfigError`` unless bubblewrap can make a sandbox with a root user here."""
    find_bubblewrap(*_AS_ROOT, otherwise=", or use --backend docker")


def bind(shown: Shown) -> tuple[str, str, str]:
    """The mount."""
    return "--bind" if shown.writable else "--ro-bind", str(shown.host), shown.inside


PROGRAMS = (
    *("python", "python3", "pip", "pip3", "tox", "pipx", "sudo"),
    *("apt", "apt-get", "locale-gen", "add-apt-repository"),
)
"""Programs that the scripts call and that need conda or root: ``shim/programs.sh`` is all of them."""


def shim_digest() -> str:
    """Changes when an environment might be made in another way."""
    files = [path for path in sorted(Path(shim.__file__).parent.iterdir()) if path.suffix in (".py", ".sh")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


@asynccontextmanager
async def fresh_room(runs: Path, layer: Path) -> AsyncIterator[Room]:
    """``layer`` with changes of its own on top, which are thrown away: an overlay where the kernel allows one, else a
    copy.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=runs))
    upper, work, merged = (scratch / name for name in ("upper", "work", "layer"))
    try:
        (scratch / "tmp").mkdir(mode=0o700)
        overlay = None
        if await asyncio.to_thread(can_overlay, runs, layer, scratch):
            for folder in (upper, work, merged):
                folder.mkdir()
            overlay = Overlay(layer, upper, work, merged)
        else:
            await copy_tree(layer, merged)
        yield Room(merged, scratch / "tmp", overlay)
    finally:
        await remove(scratch)


class SandboxBox:
    """A room's sandboxes as a ``Box``. ``wrap`` makes a command line of a command and whether it is the tests."""

    def __init__(self, room: Room, wrap: Callable[[Sequence[str], bool], list[str]]) -> None:
        self._tmp = room.tmp
        self._wrap = wrap

    async def put(self, inside: str, text: str) -> None:
        """Write a file in ``/tmp``."""
        await asyncio.to_thread((self._tmp / Path(inside).name).write_bytes, text.encode())

    async def run(
        self, command: Sequence[str], *, timeout: float, given: bytes | None = None, tests: bool = False
    ) -> Ended:
        """Run in a sandbox that ends with the command and kills all of its processes."""
        return await run(self._wrap(command, tests), timeout=timeout, given=given)
