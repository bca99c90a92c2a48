"""Files and sockets of the host that no sandbox may reach, and a program that tries to."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# Sixteen places, of which a machine without rights to one or two still leaves fifteen.
PLACES = (
    *("~", "~/.config", "~/.cache", "~/.local/share", "/run", "/var/run", "/var/lib", "/var/tmp", "/var/log"),
    *("/srv", "/mnt", "/opt", "/media", "/tmp", "/dev/shm", "/etc"),
)

REACH = r"""
import errno, os, socket, sys
for line in open(sys.argv[1]):
    kind, path = line.rstrip("\n").split(" ", 1)
    try:
        if kind == "file":
            open(path).read()
        elif kind == "folder":
            os.listdir(path)
        else:
            with socket.socket(socket.AF_UNIX, getattr(socket, kind)) as client:
                if path.startswith("@"):
                    client.connect("\0" + path[1:])
                else:  # a socket's address has 107 bytes at most
                    os.chdir(os.path.dirname(path))
                    client.connect(os.path.basename(path))
    except OSError as error:
        continue
    print("REACHED", kind, path)
for each in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"k3y" in open(f"/proc/{each}/environ", "rb").read():
            print("REACHED variables of the host")
    except OSError:
        continue
settings = [os.path.join(place, name) for at in ("/proc/sys", "/proc/pressure") for place, _, names in os.walk(at)
            for name in names]
for path in settings:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        continue
    print("REACHED kernel", path)
    break
print("TRIED")
"""


@contextmanager
def planted(*more: Path) -> Iterator[list[str]]:
    """Lines for ``REACH``: in each place that this user can write a file, its folder, and three sockets that listen."""
    name = f"rl-plant-{uuid.uuid4().hex[:12]}"
    with ExitStack() as stack:
        lines = []
        for place in (*(Path(place).expanduser() for place in PLACES), *more):
            folder = place / name
            try:
                folder.mkdir()
            except OSError:
                continue
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            (folder / "secret").write_text("s3cret")
            (folder / "secret").chmod(0o644)
            lines += [f"file {folder}/secret", f"folder {folder}"]
            lines += [
                f"{kind} {_listen(stack, kind, folder)}" for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET")
            ]
        yield lines


@contextmanager
def abstract_sockets() -> Iterator[list[str]]:
    """Lines for ``REACH``: sockets of the host that have a name but no file."""
    with ExitStack() as stack:
        name = f"rl-plant-{uuid.uuid4().hex[:12]}"
        lines = []
        for kind in ("SOCK_STREAM", "SOCK_DGRAM"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, getattr(socket, kind)))
            server.bind(f"\0{name}-{kind}")
            if kind == "SOCK_STREAM":
                server.listen()
            lines.append(f"{kind} @{name}-{kind}")
        yield lines


def write_attempt(folder: Path, lines: list[str]) -> None:
    """The program and its list, for a sandbox that shows ``folder``."""
    (folder / "reach.py").write_text(REACH)
    (folder / "plants").write_text("".join(f"{line}\n" for line in lines))


def _listen(stack: ExitStack, kind: str, folder: Path) -> Path:
    server = stack.enter_context(socket.socket(socket.AF_UNIX, getattr(socket, kind)))
    place = folder / kind
    # The address of a socket has 107 bytes at most; a link is short.
    with TemporaryDirectory() as short:
        link = Path(short, "d")
        link.symlink_to(folder)
        server.bind(str(link / kind))
    os.chmod(place, 0o777)
    if kind != "SOCK_DGRAM":
        server.listen(64)
    return place
