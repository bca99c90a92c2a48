"""What a sandbox shows of the host: the system's programs, one interpreter, and what the user allows.

Never shown, in no sandbox: ``/run`` (sockets of Docker and D-Bus), homes, ``/etc`` but for the names below, ``/srv``,
``/mnt``, ``/opt``, ``/var`` and every folder in ``/`` that is not the system's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from openhands_rl_plugin.core.files import temporary_folder
from openhands_rl_plugin.core.types import Frozen

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
_OF_NETWORK = ("/etc/hosts", "/etc/resolv.conf")
_JAVA = "java-"
_MOST_BYTES = 2**20
# Of an installation: beside these lie pip's and conda's settings, and a prefix may be a whole home.
OF_A_PREFIX = ("bin", "include", "lib", "lib64", "libexec", "pyvenv.cfg", "share", "ssl")
"""The parts of an installation of Python or conda that hold programs and libraries."""
_OWN = Path(__file__).resolve().parents[2]
_HARMLESS = frozenset({".gitignore", ".lock", ".ready", "CACHEDIR.TAG", "BUILD", "doc", "man", "ready"})


class HostPaths(Frozen):
    """Paths of the host that a session sees beside the system's, read-only or ``writable``, by their own names."""

    visible: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Both kinds."""
        return (*self.visible, *self.writable)

    def mounts(self) -> list[str]:
        """The mounts; a folder comes before those in it, so that each keeps its own kind."""
        kinds = {**dict.fromkeys(self.visible, "--ro-bind"), **dict.fromkeys(self.writable, "--bind")}
        return [part for path in sorted(kinds) for part in (kinds[path], str(path), str(path))]


def is_system(name: str) -> bool:
    """Whether an entry of ``/`` holds the system's programs, their libraries or settings."""
    return name == "etc" or _has_programs(name)


def system_mounts(*, network: bool = False, links: bool = True) -> list[str]:
    """The system's programs, their libraries and settings, read-only; with a ``network``, as it resolves names now."""
    mounts = [*program_mounts(links=links), "--ro-bind", _settings_copy(), "/etc"]
    return [*mounts, *(part for name in _OF_NETWORK if network for part in ("--ro-bind-try", name, name))]


def program_mounts(*, links: bool = True) -> list[str]:
    """The system's folders with programs, read-only; with ``links``, those of them that are links, as links."""
    return [part for mount in _programs() if links or mount[0] != "--symlink" for part in mount]


def settings_mounts() -> list[str]:
    """The files and folders of ``/etc`` that programs look for, in a folder to which others can be added."""
    found = [f"/etc/{name}" for name in _settings() if os.path.exists(f"/etc/{name}")]
    return [part for path in found for part in ("--ro-bind-try", path, path)]


def _settings_copy() -> str:
    """A folder with a copy of what programs look for in ``/etc``, as far as everybody may read it.

    It is made once: each mount takes up to a millisecond whenever a sandbox starts.
    """
    folder = _settings_folder(os.getpid())
    if not os.path.isdir(folder):  # folders of temporary files are swept
        _settings_folder.cache_clear()
        folder = _settings_folder(os.getpid())
    return folder


@functools.cache
def _settings_folder(pid: int) -> str:
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


@functools.cache
def _programs() -> tuple[tuple[str, str, str], ...]:
    entries = sorted((entry for entry in os.scandir("/") if _has_programs(entry.name)), key=lambda entry: entry.name)
    return tuple(
        ("--symlink", os.readlink(entry.path), entry.path)
        if entry.is_symlink()
        else ("--ro-bind-try", entry.path, entry.path)
        for entry in entries
    )


def interpreter_mounts(*, packages: bool, closed: bool = False, others: Sequence[str] = ()) -> list[str]:
    """The mounts that this interpreter needs to start, by the paths that it knows; of its virtual environment only what
    finds it, unless ``packages`` are asked for. ``others``: prefixes of other installations.

    ``closed``: nothing can be put beside what is mounted, where ``/`` is writable.
    """
    prefix, base = sys.prefix, sys.base_prefix
    names: dict[str, Sequence[str]] = {os.path.realpath(prefix): OF_A_PREFIX if packages else ("bin", "pyvenv.cfg")}
    names |= {os.path.realpath(path): OF_A_PREFIX for path in (base, *others)}
    mounts = prefix_mounts(names, closed=closed)
    for named in {base, prefix, *others} - set(names):
        if not is_system(named.split("/")[1]):
            mounts += ["--symlink", os.path.realpath(named), named]
    return mounts if packages else [*mounts, *hidden_package([*names])]


def hidden_package(prefixes: Sequence[str], own: Path = _OWN) -> list[str]:
    """The mounts that hide this package where it is installed in a prefix that is shown: its data has the fixes of the
    published tasks.
    """
    if not (is_system(own.parts[1]) or any(own.is_relative_to(prefix) for prefix in prefixes)):
        return []
    return ["--size", "65536", "--tmpfs", str(own), "--remount-ro", str(own)]


def prefix_mounts(prefixes: Mapping[str, Sequence[str]], *, closed: bool) -> list[str]:
    """The mounts of the named parts of installations, at their own paths. ``closed``: as in ``interpreter_mounts``."""
    # A folder comes before those in it, which its mount would hide.
    own = [prefix for prefix in sorted(prefixes) if not _has_programs(prefix.split("/")[1])]
    mounts: list[str] = []
    for prefix in own:
        if set(prefixes[prefix]) == set(OF_A_PREFIX) and _holds_only_parts(prefix):
            mounts += ["--ro-bind", prefix, prefix]
            continue
        mounts += ["--size", "65536", "--tmpfs", prefix] if closed else []
        mounts += [part for name in prefixes[prefix] for part in _part(prefix, name)]
    return [*mounts, *(part for prefix in own if closed for part in ("--remount-ro", prefix))]


def _holds_only_parts(prefix: str) -> bool:
    """One mount is as good then, and faster."""
    try:
        return not {*os.listdir(prefix)} - {*OF_A_PREFIX, *_HARMLESS}
    except OSError:
        return False


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
    """Those files and folders of an installation that hold programs and libraries."""
    return [prefix / name for name in OF_A_PREFIX if (prefix / name).exists()]


def interpreter_paths() -> tuple[str, ...]:
    """The prefixes of this interpreter, by all names."""
    named = (sys.base_prefix, sys.prefix)
    return tuple({*named, *map(os.path.realpath, named)})


def bash() -> str:
    """bash by a path that every sandbox shows: the ``PATH`` may hold a link from a folder that is hidden."""
    real = os.path.realpath(shutil.which("bash") or "/bin/bash")
    shown = is_system(real.split("/")[1]) or any(real.startswith(f"{each}/bin/") for each in interpreter_paths())
    return real if shown else "/bin/bash"


def _has_programs(name: str) -> bool:
    return name in _SYSTEM or name.startswith("lib")
