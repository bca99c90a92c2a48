"""Names of images, and where the image of a name is."""

from __future__ import annotations

import re
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen

_HUB = "docker.io"
_PART = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9.-]+(?::\d{1,5})?|\[[0-9a-fA-F:]+\](?::\d{1,5})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Reference(Frozen):
    """The parts of an image's name: ``docker.io/library/debian:12`` or ``...@sha256:...``."""

    host: str
    repository: str
    tag: str = "latest"
    digest: str = ""

    @classmethod
    def parse(cls, name: str) -> Reference:
        """As Docker reads it: without a host it is Docker Hub's. Raises ``ConfigError`` for what is no name."""
        rest, at, digest = name.removeprefix("docker://").partition("@")
        first, slash, others = rest.partition("/")
        has_host = bool(slash) and (first == "localhost" or "." in first or ":" in first)
        host, path = (first, others) if has_host else (_HUB, rest)
        path, colon, tag = path.partition(":")
        if host in ("index.docker.io", "registry-1.docker.io"):
            host = _HUB
        if host == _HUB and "/" not in path:
            path = f"library/{path}"
        valid = _HOST.fullmatch(host) and all(map(_PART.fullmatch, path.split("/"))) and len(path) < 256
        if not valid or (colon and not _TAG.fullmatch(tag)) or (at and not _DIGEST.fullmatch(digest)):
            raise ConfigError(f"{name[:200]!r} is no name of an image, as swebench/NAME:latest is")
        return cls(host=host, repository=path, tag=tag or "latest", digest=digest)

    def __str__(self) -> str:
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.host}/{self.repository}{end}"


def find_file(folder: Path, reference: Reference) -> Path | None:
    """The file or layout in a folder for an image: ``NAME_TAG`` or ``NAME``, as ``apptainer pull`` writes it, with one
    of the endings below; ``OWNER_NAME`` comes first.
    """
    *owners, name = reference.repository.split("/")
    stems = ["_".join([*owners, name]), name]
    for stem in (f"{each}{tag}" for each in stems for tag in (f"_{reference.tag}", "")):
        for ending in ENDINGS:
            if (found := folder / f"{stem}{ending}").exists():
                return found
    return None


ENDINGS = ("", ".sif", ".tar", ".tar.gz", ".tgz", ".tar.zst", ".oci")
"""Of files and folders that hold images."""
