"""The JSON documents of an image: index, manifest and configuration, as OCI and Docker write them.

Source: OCI image specification 1.1 (image-index, manifest, config), and Docker's "Image Manifest Version 2, Schema 2".
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.types import Frozen

MOST_OF_JSON = 8 * 2**20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "amd64": "amd64"}
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
ACCEPTED = (*_INDEXES, *_MANIFESTS)
"""The types of manifests that are understood."""


class Platform(Frozen):
    """An operating system and an architecture in Go's words: ``linux/amd64``."""

    os: str = "linux"
    architecture: str

    @classmethod
    def here(cls) -> Platform:
        """This machine's."""
        machine = platform.machine().lower()
        return cls(architecture=_ARCHITECTURES.get(machine, machine))

    @classmethod
    def parse(cls, text: str) -> Platform:
        """``linux/amd64``; a variant behind it is left out. Raises ``ConfigError``."""
        system, slash, rest = text.partition("/")
        if not slash or not rest or system != "linux":
            raise ConfigError(f"--platform {text}: give linux/amd64 or linux/arm64")
        return cls(os=system, architecture=rest.split("/")[0])

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"


class Descriptor(Frozen):
    """Another document or layer: its digest, its size in bytes (0: not known), its type and its annotations."""

    digest: str
    size: int = 0
    media_type: str = ""
    annotations: dict[str, str] = Field(default_factory=dict)
    platform: dict[str, Any] = Field(default_factory=dict)


class Manifest(Frozen):
    """The configuration and the layers of an image, lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


class ImageConfig(Frozen):
    """What an image says of itself: how its programs are started, and the digests of its layers when they are
    uncompressed, lowest first.
    """

    platform: str
    diff_ids: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    command: tuple[str, ...] = ()
    """Entrypoint and arguments."""


def digest_of(data: bytes) -> str:
    """``sha256:...``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(text: object, what: str) -> str:
    """``text``, which becomes part of paths. Raises ``BadEnvironmentError`` for what is no SHA-256 digest."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise BadEnvironmentError(f"{what}: {str(text)[:80]!r} is no sha256 digest")
    return text


def read_json(data: bytes, what: str, digest: str = "") -> dict[str, Any]:
    """An object in JSON, whose ``digest`` is compared. Raises ``BadEnvironmentError``."""
    if digest and digest_of(data) != digest:
        raise BadEnvironmentError(f"{what} is damaged: its content does not have the digest {digest}")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadEnvironmentError(f"{what} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadEnvironmentError(f"{what} is no JSON object")
    return found


def is_index(document: Mapping[str, Any]) -> bool:
    """Whether it lists manifests of several platforms or images."""
    return isinstance(document.get("manifests"), list)


def choose(document: Mapping[str, Any], wanted: Platform, what: str, name: str = "") -> Descriptor:
    """The manifest in an index for a platform, and, where the index holds several images, of that ``name`` or tag.

    Raises ``ConfigError`` where there is none, or several.
    """
    found = [_descriptor(each, what) for each in document["manifests"]]
    # Attestations of builds have this platform.
    found = [each for each in found if each.platform.get("architecture") != "unknown"]
    of_platform = [each for each in found if _fits(each, wanted)]
    if not of_platform:
        others = ", ".join(sorted({f"{each.platform.get('os')}/{each.platform.get('architecture')}" for each in found}))
        raise ConfigError(f"{what} has no image for {wanted}{f', only for {others}' if others else ''}")
    named = [each for each in of_platform if name and _is_named(each, name)] or of_platform
    if len({each.digest for each in named}) > 1:
        names = ", ".join(sorted({text for each in of_platform for text in _names(each)})) or "without names"
        raise ConfigError(f"{what} has {len(named)} images ({names}); say which with --name")
    return named[0]


def read_manifest(document: Mapping[str, Any], what: str) -> Manifest:
    """A manifest. Raises ``BadEnvironmentError``."""
    layers = document.get("layers")
    if not isinstance(layers, list):
        raise BadEnvironmentError(f"{what} is no manifest of an image: it has no layers")
    return Manifest(
        config=_descriptor(document.get("config"), what), layers=tuple(_descriptor(each, what) for each in layers)
    )


def read_config(data: bytes, what: str, digest: str = "") -> ImageConfig:
    """The configuration of an image. Raises ``BadEnvironmentError``."""
    document = read_json(data, what, digest)
    settings, layers = document.get("config") or {}, (document.get("rootfs") or {}).get("diff_ids") or ()
    if "\\u0000" in data.decode("utf-8", "replace"):
        raise BadEnvironmentError(f"{what} is no configuration of an image: a text has a zero in it")
    try:
        pairs = [text.partition("=") for text in settings.get("Env") or ()]
        return ImageConfig(
            platform=f"{document.get('os', 'linux')}/{document.get('architecture', '')}",
            diff_ids=tuple(check_digest(each, what) for each in layers),
            env={name: value for name, equals, value in pairs if equals and name},
            workdir=f"/{(settings.get('WorkingDir') or '').lstrip('/')}",
            user=settings.get("User") or "",
            command=(*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())),
        )
    except (AttributeError, TypeError, ValidationError) as error:
        raise BadEnvironmentError(f"{what} is no configuration of an image: {error}") from error


def check_platform(config: ImageConfig, wanted: Platform, what: str) -> None:
    """Raise ``ConfigError`` for an image whose programs do not run there."""
    if config.platform != str(wanted):
        raise ConfigError(f"{what} is for {config.platform}, not for {wanted}; --platform says which is wanted")


def _descriptor(value: object, what: str) -> Descriptor:
    if not isinstance(value, dict):
        raise BadEnvironmentError(f"{what} is damaged: a descriptor is missing")
    try:
        return Descriptor(
            digest=check_digest(value.get("digest"), what),
            size=max(0, int(value.get("size") or 0)),
            media_type=str(value.get("mediaType") or ""),
            annotations=value.get("annotations") or {},
            platform=value.get("platform") or {},
        )
    except (TypeError, ValueError, ValidationError) as error:
        raise BadEnvironmentError(f"{what} is damaged: a descriptor cannot be read") from error


def _fits(each: Descriptor, wanted: Platform) -> bool:
    own = each.platform
    return not own or (own.get("os", "linux"), own.get("architecture")) == (wanted.os, wanted.architecture)


def _names(each: Descriptor) -> Sequence[str]:
    keys = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
    return [each.annotations[key] for key in keys if each.annotations.get(key)]


def _is_named(each: Descriptor, name: str) -> bool:
    tag = name.rpartition("/")[2].partition(":")[2]
    return any(own in (name, tag) or own.endswith(f"/{name}") for own in _names(each))
