"""Container images made by tests: layers as lists of members, archives of several kinds, and a small Linux of this
machine's programs in which the repository of ``repository_samples`` can be graded.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backports import zstd

PROGRAMS = (
    *("bash", "sh", "git", "patch", "find", "sleep", "cat", "rm", "head", "mkdir", "ls", "id", "touch", "env", "mount"),
    *("chmod", "sed", "grep", "pwd", "stat"),
)
ACTIVATE = """\
conda() { export CONDA_PREFIX=/opt/miniconda3/envs/testbed PATH="/opt/miniconda3/envs/testbed/bin:$PATH"; }
"""
_MODULES = (
    *("_bisect", "_csv", "_heapq", "_json", "_opcode", "_posixsubprocess", "_random", "_sha", "_socket", "_struct"),
    *("array", "binascii", "fcntl", "grp", "math", "resource", "select", "zlib"),
)
_LEFT_OUT = (
    "test",
    "asyncio",
    "pydoc_data",
    "site-packages",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "__pycache__",
)


class Member(NamedTuple):
    """A member of a layer. ``kind``: a type of ``tarfile``."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    xattrs: Mapping[str, str] = {}


def folder(name: str, mode: int = 0o755) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=target)


def hard_link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.LNKTYPE, link=target)


def layer(members: Iterable[Member]) -> bytes:
    """The archive of a layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for each in members:
            info = tarfile.TarInfo(each.name)
            info.type, info.mode, info.linkname, info.mtime = each.kind, each.mode, each.link, 1_700_000_000
            info.size = len(each.content)
            info.pax_headers = {f"SCHILY.xattr.{name}": value for name, value in each.xattrs.items()}
            archive.addfile(info, io.BytesIO(each.content))
    return out.getvalue()


PACKERS = {
    "": lambda data: data,
    "+gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "+zstd": zstd.compress,
}


class MadeImage(NamedTuple):
    """An image as documents: blobs by digest, and the digests of its configuration and manifest."""

    blobs: dict[str, bytes]
    config: str
    manifest: str
    layers: tuple[bytes, ...]


def make_image(layers: Sequence[bytes], packed: str = "+gzip", architecture: str = "", **settings: object) -> MadeImage:
    """An image of uncompressed layers. ``settings``: ``Env``, ``WorkingDir``, ``User``..."""
    machine = architecture or {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str, **more: object) -> dict[str, object]:
        digest = sha256(data)
        blobs[digest] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": len(data), **more}

    config = {
        "os": "linux",
        "architecture": machine,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [sha256(each) for each in layers]},
    }
    described = blob(json.dumps(config).encode(), "config.v1+json")
    packs = [blob(PACKERS[packed](each), f"layer.v1.tar{packed}") for each in layers]
    manifest = blob(json.dumps({"schemaVersion": 2, "config": described, "layers": packs}).encode(), "manifest.v1+json")
    return MadeImage(blobs, str(described["digest"]), str(manifest["digest"]), tuple(layers))


def index_of(images: Mapping[str, MadeImage], *, tag: str = "latest") -> bytes:
    """An index of images by platform."""
    return json.dumps(
        {
            "schemaVersion": 2,
            "manifests": [
                {
                    "mediaType": "application/vnd.oci.image.manifest.v1+json",
                    "digest": image.manifest,
                    "size": len(image.blobs[image.manifest]),
                    "platform": {"os": platform.split("/")[0], "architecture": platform.split("/")[1]},
                    "annotations": {"org.opencontainers.image.ref.name": tag},
                }
                for platform, image in images.items()
            ],
        }
    ).encode()


def here() -> str:
    return f"linux/{ {'x86_64': 'amd64', 'aarch64': 'arm64'}[os.uname().machine] }"


def oci_files(image: MadeImage, index: bytes = b"") -> dict[str, bytes]:
    """The files of an OCI layout."""
    names = {f"blobs/{digest.replace(':', '/')}": data for digest, data in image.blobs.items()}
    own = index or index_of({here(): image})
    return {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": own, **names}


def docker_files(image: MadeImage, *tags: str) -> dict[str, bytes]:
    """The files that ``docker save`` wrote before version 25."""
    name = f"{image.config.removeprefix('sha256:')}.json"
    layers = {f"{hashlib.sha256(each).hexdigest()}/layer.tar": each for each in image.layers}
    listed = [{"Config": name, "RepoTags": list(tags), "Layers": list(layers)}]
    return {name: image.blobs[image.config], **layers, "manifest.json": json.dumps(listed).encode()}


def write_archive(path: Path, files: Mapping[str, bytes]) -> Path:
    data = layer(Member(name, content) for name, content in files.items())
    packer = {".gz": PACKERS["+gzip"], ".zst": PACKERS["+zstd"]}.get(path.suffix, PACKERS[""])
    path.write_bytes(packer(data))
    return path


def write_layout(path: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@functools.cache
def linux_layer() -> bytes:
    """This machine's shell, git, patch, Python and what they need, at the same paths."""
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    library = Path(sys.base_prefix, "lib", python.name)
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))]
    modules = [each for each in library.glob("lib-dynload/*.so") if each.name.startswith(_MODULES)]
    found = {*programs, python, *modules, *_libraries(*programs, python, *modules)}
    top = [
        symlink(entry.name, os.readlink(entry.path))
        for entry in os.scandir("/")
        if entry.is_symlink() and os.readlink(entry.path).startswith("usr/")
    ]
    files = [_file(path) for path in sorted(found)]
    files += [
        _file(path)
        for path in sorted(library.rglob("*.py"))
        if not any(part in _LEFT_OUT for part in path.relative_to(library).parts)
    ]
    own = [
        folder("tmp", 0o1777),
        folder("root"),
        Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nworker:x:1234:1234::/home/worker:/bin/sh\n"),
        Member("etc/group", b"root:x:0:\nworker:x:1234:\n"),
        Member("opt/miniconda3/bin/activate", ACTIVATE.encode()),
        symlink("opt/miniconda3/envs/testbed/bin/python", str(python)),
    ]
    return layer([*top, *files, *own])


def repository_layer(clone: Path) -> bytes:
    """``/testbed``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:") as archive:
        archive.add(clone, "testbed")
    return out.getvalue()


def _file(path: Path) -> Member:
    real = path.resolve()
    return Member(_place(path), real.read_bytes(), mode=real.stat().st_mode & 0o7777)


def _place(path: Path) -> str:
    """Where a program is once ``/bin`` is a link."""
    first = f"/{path.parts[1]}"
    whole = Path(os.path.realpath(first), *path.parts[2:]) if os.path.islink(first) else path
    return str(whole).lstrip("/")


def _libraries(*programs: Path) -> list[Path]:
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    words = [word for line in said.splitlines() for word in line.split() if word.startswith("/") and word[-1] != ":"]
    return [Path(word) for word in words]
