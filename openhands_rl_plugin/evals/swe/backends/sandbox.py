"""Bubblewrap as the place of the official scripts: a root of its own with the repository at ``/testbed``, conda's
place taken by the shim, and of the host what programs need and nothing more. A set-up also has the user's settings of
the package index, which no test and no agent sees.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import remove_tree
from openhands_rl_plugin.environments.workspace.git import git_settings
from openhands_rl_plugin.environments.workspace.processes import Ended, checked, run
from openhands_rl_plugin.environments.workspace.sandbox import (
    OF_A_PREFIX,
    Overlay,
    SandboxLimits,
    can_overlay,
    empty_root,
    installed_parts,
    is_system,
    limited,
    prefix_mounts,
    program_mounts,
    sandboxed,
    settings_mounts,
)
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.backends import shim
from openhands_rl_plugin.evals.swe.types import Checkout

CONDA = "/opt/miniconda3"
PARTS = {"conda": "/conda", "root": "/root", "testbed": "/testbed"}
"""The parts of a layer, and where the sandbox mounts them. Environments and uv's cache lie in one, as uv links files
within one mount only.
"""
PROGRAMS = (
    *("python", "python3", "pip", "pip3", "tox", "pipx", "sudo"),
    *("apt", "apt-get", "locale-gen", "add-apt-repository"),
)
"""Programs that the scripts call and that need conda or root: ``shim/programs.sh`` is all of them."""

_GIBIBYTE = 1024**3
_ROOT_SIZE = 256 * 1024**2
_SHIM = Path(shim.__file__).parent
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
"""What root in a container may do, without anything that reaches mounts, devices or other processes' memory."""
AS_ROOT = ("--unshare-user", "--uid", "0", "--gid", "0")
# ``localhost`` is a name that resolves without a network.
_OF_ROOT = (
    *(*AS_ROOT, "--hostname", "localhost", "--die-with-parent"),
    *(word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}")),
)
LIMITS = SandboxLimits(memory=16 * _GIBIBYTE, processes=8192, file=8 * _GIBIBYTE)
"""Of the sandbox of an instance."""

_OF_NETWORK = "(?:HTTPS?|ALL|NO|FTP)_PROXY|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
_OF_INDEX = r"(?:PIP|UV)_\w*(?:INDEX|FIND_LINKS|CERT|PROXY|HOST|TLS|TIMEOUT)\w*"
_INDEX_FILES = {
    **{f"~/{name}": f"/root/{name}" for name in (".config/uv/uv.toml", ".config/pip/pip.conf", ".netrc")},
    **{name: name for name in ("/etc/pip.conf", "/etc/uv/uv.toml")},
}


@functools.cache
def find_python(version: str) -> Path:
    """The program of a Python ``version`` ("3.9"), below ``bin`` of the folder that holds all of it; no virtual
    environment. Raises ``ConfigError`` that says how to get one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\.\d+)?", version)
    short = match[1] if match else "?"
    pyenv = Path("~/.pyenv/versions").expanduser().glob(f"{short}.*/bin")
    path = os.pathsep.join([f"{sys.base_prefix}/bin", *map(str, pyenv), os.environ.get("PATH", os.defpath)])
    find = [find_uv(), "python", "find", "--no-project", "--no-config", "--no-python-downloads", "--system", short]
    found = subprocess.run(find, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"Python {version:.20} is not installed; get it with: uv python install {short}")
    return Path(found.stdout.strip()).resolve()


@functools.cache
def find_uv() -> Path:
    """The program ``uv``, that of this environment before others. Raises ``ConfigError``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which("uv", path=path)) is None:
        raise ConfigError("uv is not installed, which environments are made with; get it with: pip install uv")
    return Path(found).resolve()


def with_own_interpreter(directory: Path) -> Checkout:
    """A checkout whose commands have the Python that runs this program."""
    prefix = Path(sys.base_prefix).resolve()
    parts = [] if is_system(prefix.parts[1]) else installed_parts(prefix)
    return Checkout(
        directory=directory,
        mounts=tuple(WorkspaceMount(host=part, inside=str(part)) for part in parts),
        variables={"PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )


class Room(NamedTuple):
    """The folders behind one sandbox. ``layer`` holds ``PARTS``; with an overlay, which is mounted in a namespace that
    ends with the sandbox, it is empty until then.
    """

    layer: Path
    tmp: Path
    overlay: Overlay | None = None


class InstanceSandbox(NamedTuple):
    """Command lines that run a program in a room as root in a container would. ``interpreter``: the program."""

    interpreter: Path
    exclude_newer: str
    limits: SandboxLimits = LIMITS

    def wrap(
        self,
        room: Room,
        program: Sequence[str],
        *,
        network: bool,
        setup: bool = False,
        shown: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The command line that runs ``program`` in ``room``, in ``/testbed`` if that exists.

        ``setup``: with the user's settings of the package index. ``shown``: what is seen of the host, by the names
        inside.
        """
        parts = {inside: room.layer / name for name, inside in PARTS.items()}
        parts = {inside: host for inside, host in parts.items() if room.overlay or host.exists()}
        folders = [inside for inside in parts if inside == "/testbed"]
        prefixes = {os.path.realpath(prefix): OF_A_PREFIX for prefix in (self.interpreter.parents[1], sys.base_prefix)}
        host = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        targets = {f"{CONDA}/shims/{name}": "../shim/programs.sh" for name in PROGRAMS}
        targets |= {f"{CONDA}/host-python": host, f"{CONDA}/envs": "/conda/envs"}
        tools = {f"{CONDA}/bin/activate": _SHIM / "activate.sh", f"{CONDA}/shim": _SHIM, f"{CONDA}/bin/uv": find_uv()}
        settings = {**self._variables(network, setup), **(variables or {})}
        if setup:
            links = f"{settings.get('PIP_FIND_LINKS', '')} {settings.get('UV_FIND_LINKS', '')}".split()
            tools |= {
                **_index_files(),
                **{name: Path(name) for name in links if name[0] == "/" and os.path.isdir(name)},
            }
        tools |= shown or {}
        mounts = ["--bind", str(room.tmp), "/tmp"]
        mounts += [word for inside, host in parts.items() for word in ("--bind", str(host), inside)]
        mounts += prefix_mounts(prefixes)
        mounts += [word for inside, host in tools.items() for word in ("--ro-bind", str(host), inside)]
        mounts += [word for inside, target in targets.items() for word in ("--symlink", target, inside)]
        return [
            *(room.overlay.mounting() if room.overlay else ()),
            *sandboxed(
                limited(self.limits, program),
                mounts,
                root=[*empty_root(_ROOT_SIZE), *program_mounts(), *settings_mounts()],
                network=network,
                options=_OF_ROOT,
                variables=settings,
                folder="/testbed" if folders else "/",
            ),
        ]

    def _variables(self, network: bool, setup: bool) -> dict[str, str]:
        wanted = re.compile("|".join([_OF_NETWORK] * network + [_OF_INDEX] * setup) or "-", re.IGNORECASE)
        named = {name: value for name, value in os.environ.items() if wanted.fullmatch(name)}
        return {
            # Tests have no login, also not that of a proxy.
            **{name: value for name, value in named.items() if setup or "@" not in value},
            "HOME": "/root",
            "PATH": f"{CONDA}/bin:{_SYSTEM_PATH}",
            "TZ": "Etc/UTC",
            "DEBIAN_FRONTEND": "noninteractive",
            "SHIM_UV": f"{CONDA}/bin/uv",
            "SHIM_PYTHON": str(self.interpreter),
            "UV_LINK_MODE": "hardlink" if network else "copy",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_CACHE_DIR": "/conda/uv",
            **({"UV_EXCLUDE_NEWER": self.exclude_newer} if self.exclude_newer else {}),
            **({} if network else {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}),
            **git_settings({"safe.directory": "*", "protocol.file.allow": "always", "gc.auto": "0"}),
        }


def _index_files() -> dict[str, Path]:
    """The files with the user's settings of the index, by the paths at which root reads them in a sandbox."""
    files = {inside: Path(name).expanduser() for name, inside in _INDEX_FILES.items()}
    return {inside: file for inside, file in files.items() if file.is_file()}


def shim_digest() -> str:
    """Changes when an environment might be made in another way."""
    files = [path for path in sorted(_SHIM.iterdir()) if path.suffix in (".py", ".sh")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


@asynccontextmanager
async def fresh_room(runs: Path, layer: Path) -> AsyncIterator[Room]:
    """``layer`` with changes of its own on top, which are thrown away: an overlay where the kernel allows one, else a
    copy.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=runs))
    upper, work, merged, tmp = (scratch / name for name in ("upper", "work", "layer", "tmp"))
    try:
        tmp.mkdir(mode=0o700)
        if await asyncio.to_thread(can_overlay, runs, layer, scratch):
            for folder in (upper, work, merged):
                folder.mkdir()
            yield Room(merged, tmp, Overlay(layer, upper, work, merged))
        else:
            await copy_tree(layer, merged)
            yield Room(merged, tmp)
    finally:
        await remove(scratch)


class SandboxBox(NamedTuple):
    """A room's sandboxes as a ``Box``. ``network``: for the tests."""

    sandbox: InstanceSandbox
    room: Room
    network: bool

    async def run(
        self, command: Sequence[str], *, timeout: float, given: bytes | None = None, tests: bool = False
    ) -> Ended:
        """Run in a sandbox that ends with the command and kills all of its processes."""
        wrapped = self.sandbox.wrap(self.room, command, network=tests and self.network)
        return await run(wrapped, timeout=timeout, given=given, limits=self.sandbox.limits)


async def remove(folder: Path) -> None:
    """Delete a folder recursively, whatever its modes."""
    await asyncio.shield(asyncio.to_thread(remove_tree, folder))


async def copy_tree(source: Path, target: Path, how: str = "--reflink=auto") -> None:
    """Copy a folder with modes, times and links: by reference where the file system can, or by hard links
    (``--link``)."""
    await checked(["cp", "-a", how, "--", str(source), str(target)], f"copy {source.name}")
