"""Adapters on disk: one directory a version, written once, never overwritten, found by name.

``<root>/webshop-v000007/`` holds PEFT's files, or a whole model, and ``manifest.json`` (an ``Adapter``);
``<root>/webshop.current.json`` points at the version in use. Both appear by a rename, so a reader sees the whole of a
version or nothing of it. ``probe.json`` (a ``Probe``) comes with a version, or joins it when it is published: the
trainer's logprobs, to check any server against.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, PublishError, StorageError, describe
from openhands_rl_plugin.core.files import draft_folder, file_sha256, sync, write_file
from openhands_rl_plugin.core.types import Adapter, Frozen, Probe, versioned_name

WEIGHTS_FILE = "adapter_model.safetensors"
MANIFEST = "manifest.json"
PROBE = "probe.json"
PROBED = "probed.json"
METRICS_FILE = "metrics.jsonl"
UNFINISHED = (".new-*", ".verifier-*")
"""Name patterns of unfinished folders, which only their writers may use."""

_POINTER = ".current.json"
_ABANDONED = 24 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


class Pointer(Frozen):
    """Which version of an adapter is in use."""

    name: str


class ServedBy(Frozen):
    """URL of a server that was given a version from its directory -> how far its logprobs of the probe were from the
    trainer's: the mean absolute difference, in nats; ``None`` without a probe."""

    differences: dict[str, float | None] = Field(default_factory=dict)


class AdapterStore:
    """The versions of any number of adapters below one directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()  # a server may have another working directory

    def create(
        self,
        name: str,
        write: Callable[[Path], None],
        *,
        base_model: str,
        parent: str | None = None,
        step: int = 0,
        metrics: dict[str, float] | None = None,
        probe: Probe | None = None,
    ) -> Adapter:
        """Let ``write`` fill a directory with PEFT's files and make it, with its ``probe``, the next version of
        ``name``.

        Raises ``ConfigError`` for a name that is no plain file name, ``StorageError`` when nothing could be written
        (then nothing of it stays).
        """
        check_name(name)
        try:
            sweep(self.root)
            with draft_folder(self.root, ".new-") as fresh:
                write(fresh)
                if probe is not None:
                    write_file(fresh / PROBE, probe.model_dump_json())
                for file in fresh.iterdir():
                    sync(file)
                about = {"parent": parent, "base_model": base_model, "step": step, "metrics": metrics or {}}
                while True:
                    latest = self.latest(name)
                    version = latest.version + 1 if latest is not None else 1
                    target = self.root / versioned_name(name, version)
                    own = {"name": target.name, "version": version, "path": str(target)}
                    adapter = Adapter.model_validate({**own, **about, "sha256": weights_sha256(fresh)})
                    write_file(fresh / MANIFEST, adapter.model_dump_json(indent=1))
                    try:
                        os.rename(fresh, target)
                    except OSError:
                        if not target.exists():
                            raise
                        continue  # another process took this version
                    sync(self.root)
                    return adapter
        except OSError as error:
            raise StorageError(
                f"the adapter cannot be written below {self.root}: {describe(error)}; free some space or choose "
                "another adapters_path"
            ) from error

    def get(self, versioned: str) -> Adapter:
        """The adapter of a versioned name. Raises ``StorageError`` when there is none or its manifest is damaged."""
        check_name(versioned)
        if (adapter := _read(self.root / versioned / MANIFEST, Adapter)) is None:
            raise StorageError(f"there is no adapter {versioned} below {self.root}")
        # The directory may have been moved since it was written.
        return adapter.model_copy(update={"path": str(self.root / versioned)})

    def versions(self, name: str) -> tuple[Adapter, ...]:
        """All versions of ``name``, oldest first."""
        found = [entry.name for entry in self.root.glob(f"{check_name(name)}-v*") if (entry / MANIFEST).exists()]
        return tuple(sorted((self.get(each) for each in found), key=lambda adapter: adapter.version))

    def latest(self, name: str) -> Adapter | None:
        """The newest version of ``name``, in use or not."""
        return next(reversed(self.versions(name)), None)

    def current(self, name: str) -> Adapter | None:
        """The version in use, or ``None`` for the base model."""
        pointer = _read(self._pointer(name), Pointer)
        return None if pointer is None else self.get(pointer.name)

    def in_use(self) -> tuple[Adapter, ...]:
        """The version in use of every name. Raises ``StorageError``."""
        names = [each.name.removesuffix(_POINTER) for each in sorted(self.root.glob(f"*{_POINTER}"))]
        return tuple(found for name in names if (found := self.current(name)) is not None)

    def point(self, adapter: Adapter) -> None:
        """Make ``adapter`` the version in use, atomically. Raises ``StorageError``."""
        name = adapter.name.rpartition("-v")[0]
        write_file(self._pointer(name), Pointer(name=adapter.name).model_dump_json())

    def point_at_base(self, name: str) -> None:
        """Make the base model what is in use: no version of ``name`` is. Raises ``StorageError``."""
        try:
            self._pointer(name).unlink(missing_ok=True)
            if self.root.exists():
                sync(self.root)
        except OSError as error:
            raise StorageError(f"{self._pointer(name)} cannot be removed: {describe(error)}") from error

    def remove(self, versioned: str) -> None:
        """Delete a version that is not in use. One that is not there is no error. Raises ``StorageError``.

        Keep the newest: its number shows which one is next, and a name is never given twice.
        """
        current = self.current(check_name(versioned).rpartition("-v")[0])
        if current is not None and current.name == versioned:
            raise StorageError(f"{versioned} is in use: publish another version before it is removed")
        try:
            with draft_folder(self.root, ".new-") as away, suppress(FileNotFoundError):
                os.rename(self.root / versioned, away / versioned)  # a reader sees the whole of it or nothing
        except OSError as error:
            raise StorageError(f"{self.root / versioned} cannot be removed: {describe(error)}") from error

    def verify(self, adapter: Adapter) -> None:
        """Raise ``PublishError`` unless the weights are those that were written."""
        path = Path(adapter.path)
        if not weights_files(path) or weights_sha256(path) != adapter.sha256:
            why = "the weights are missing or damaged (their sha256 is not that of the manifest)"
            raise PublishError(f"{adapter.name}: {path}: {why}")

    def keep_probe(self, adapter: Adapter, probe: Probe) -> None:
        """Write the trainer's logprobs into the version's folder. Raises ``StorageError``."""
        write_file(self.root / adapter.name / PROBE, probe.model_dump_json())

    def probe(self, adapter: Adapter) -> Probe | None:
        """The probe that ``keep_probe`` wrote. Raises ``StorageError`` if it is damaged."""
        return _read(self.root / adapter.name / PROBE, Probe)

    def previous_probe(self, adapter: Adapter, token_ids: Sequence[int]) -> tuple[str, Probe] | None:
        """The version that a server would still have if it did not load ``adapter``, and its probe of the same text.

        It is the version in use, or the newest one before if ``adapter`` is in use, or if there is no such probe.
        """
        name = adapter.name.rpartition("-v")[0]
        older = [each for each in reversed(self.versions(name)) if each.version < adapter.version]
        current = self.current(name)
        for each in older if current is None or current.name == adapter.name else [current, *older]:
            with suppress(StorageError):  # a damaged one proves nothing, and is no reason to refuse a new version
                if (probe := self.probe(each)) is not None and probe.token_ids == tuple(token_ids):
                    return each.name, probe
        return None

    def note_served(self, adapter: Adapter, differences: Mapping[str, float | None]) -> None:
        """Note the servers that have these weights, and what they answered to the probe. Raises ``StorageError``."""
        known = {**self.served_by(adapter), **differences}
        write_file(self.root / adapter.name / PROBED, ServedBy(differences=known).model_dump_json())

    def served_by(self, adapter: Adapter) -> dict[str, float | None]:
        """Server -> difference, as ``note_served`` wrote it. Other servers may have a former run's weights.

        The note is in the version's directory, so that it is gone when the directory was made anew.
        """
        try:
            return ServedBy.model_validate_json((self.root / adapter.name / PROBED).read_bytes()).differences
        except (OSError, ValidationError):
            return {}

    def _pointer(self, name: str) -> Path:
        return self.root / f"{check_name(name)}{_POINTER}"


def _read[M: BaseModel](path: Path, kind: type[M]) -> M | None:
    """``None`` where there is no such file. Raises ``StorageError``."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StorageError(f"{path} cannot be read: {describe(error)}; remove it, or put a copy there") from error


def weights_files(directory: Path) -> list[Path]:
    """The files of a version's weights: an adapter's one, or those of a whole model."""
    adapter = directory / WEIGHTS_FILE
    return [adapter] if adapter.is_file() else sorted(directory.glob("*.safetensors"))


def weights_sha256(directory: Path) -> str:
    """The digest of an adapter's weights, or of the names and digests of a whole model's files. Raises ``OSError``."""
    files = weights_files(directory) or [directory / WEIGHTS_FILE]
    if files[0].name == WEIGHTS_FILE:
        return file_sha256(files[0])
    return hashlib.sha256("".join(f"{file.name} {file_sha256(file)}\n" for file in files).encode()).hexdigest()


def check_name(name: str) -> str:
    """Return ``name``; raise ``ConfigError`` unless it is a plain file name."""
    if not _NAME.match(name) or ".." in name:
        raise ConfigError(f"{name[:100]!r} is no adapter name: use letters, digits, '.', '_' and '-', and no '..'")
    return name


def sweep(root: Path) -> None:
    """Remove what writers that were killed have left below ``root``: unfinished directories of more than a day ago."""
    for pattern in UNFINISHED:
        for left in root.glob(pattern):
            with suppress(FileNotFoundError):  # somebody else has swept it
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(left, ignore_errors=True)
