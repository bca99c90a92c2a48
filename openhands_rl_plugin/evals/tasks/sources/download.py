"""Getting sources: archives through the user's own pip or uv and its configured index, repositories through git."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.files import file_sha256
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.backends.interpreters import find_uv
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.packages import Package, Release
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree, bounded, read_archive

_SECONDS = 600


class SourceOrigin(Frozen):
    """Where a tree came from, exactly: a release or an archive with its hash, or a repository with a commit."""

    kind: str
    name: str
    version: str
    pin: str
    place: str = ""

    def as_json(self) -> JsonObject:
        """As it stands in a row."""
        if self.kind == "git":
            return {"git": self.place, "commit": self.pin}
        if self.kind == "archive":
            return {"archive": self.name, "path": self.place, "sha256": self.pin}
        return {"sdist": self.name, "version": self.version, "sha256": self.pin}


def fetch(package: Package, cache: Path) -> tuple[SourceOrigin, SourceTree]:
    """The files of a package. Raises ``ConfigError`` for an unknown one, ``InfrastructureError`` without network."""
    if package.git is not None:
        return _from_git(package, cache)
    if package.archive is not None:
        pin = file_sha256(package.archive)
        origin = SourceOrigin(kind="archive", name=package.name, version=pin[:8], pin=pin, place=str(package.archive))
        return origin, read_archive(package.archive)
    assert package.release is not None
    return fetch_release(package.name, package.release, cache)


def fetch_release(name: str, release: Release, cache: Path) -> tuple[SourceOrigin, SourceTree]:
    """The source archive of a release, from the cache or the index. Raises as ``fetch`` does, and for another hash."""
    folder = cache / "sdists" / f"{name.lower()}-{release.version}"
    archive = next((path for path in sorted(folder.glob("*")) if not path.name.startswith(".")), None)
    if archive is None:
        archive = _download(name, release.version, folder)
    pin = file_sha256(archive)
    if release.sha256 and pin != release.sha256:
        raise ConfigError(
            f"{name} {release.version}: {archive} has another sha256 ({pin}) than the pinned {release.sha256};"
            " delete the file, or find out who changed it"
        )
    return SourceOrigin(kind="sdist", name=name, version=release.version, pin=pin), read_archive(archive)


def _download(name: str, version: str, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as fresh:
        words = [*_pip(), "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", fresh]
        said = _said([*words, f"{name}=={version}"], f"{name} {version}")
        found = [path for path in sorted(Path(fresh).iterdir()) if re.search(r"\.(tar\.\w+|tgz|zip)$", path.name)]
        if not found:
            raise _why_not(name, version, said)
        folder.mkdir(exist_ok=True)
        return Path(shutil.move(str(found[0]), folder / found[0].name))


def _pip() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [str(find_uv()), "tool", "run", "--quiet", "--python", sys.executable, "pip"]


def _said(command: list[str], what: str) -> str:
    """What a command says when it fails, and nothing when it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"fetching {what} took more than {_SECONDS} s; try again") from error
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error
    return done.stderr if done.returncode else ""


def _why_not(name: str, version: str, said: str) -> ConfigError | InfrastructureError:
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
    if re.search(r"from versions: none|Temporary failure|Name or service|Connection|timed out|dns error", said):
        return InfrastructureError(
            f"{name} {version} could not be fetched: the index does not know it with a source archive, or cannot be"
            f" reached ({last.strip()})"
        )
    if "No matching distribution" in said:
        return ConfigError(f"{name} has no version {version} with a source archive on the package index")
    return ConfigError(f"{name} {version} could not be fetched: {last.strip()}")


def _from_git(package: Package, cache: Path) -> tuple[SourceOrigin, SourceTree]:
    repository = open_git(package, cache)
    try:
        commit = repository.text("rev-parse", "--verify", f"{package.commit}^{{commit}}").strip()
    except ConfigError as error:
        raise ConfigError(f"{package.git} has no commit {package.commit}") from error
    origin = SourceOrigin(kind="git", name=package.name, version=commit[:8], pin=commit, place=package.git or "")
    return origin, bounded(repository.tree(commit), package.label)


def open_git(package: Package, cache: Path) -> GitRepository:
    """The repository where it lies, or a copy in the cache of one that is elsewhere. Raises as ``fetch`` does."""
    where = package.git or ""
    if "://" not in where and Path(where).exists():
        return GitRepository(Path(where))
    copy = cache / "git" / hashlib.sha256(where.encode()).hexdigest()[:16]
    if not (copy / "HEAD").exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if said := _said(["git", "clone", "--quiet", "--bare", where, str(copy)], where):
            raise InfrastructureError(f"{where} could not be cloned: {said.strip().splitlines()[-1]}")
    return GitRepository(copy)
