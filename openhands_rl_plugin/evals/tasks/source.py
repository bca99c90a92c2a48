"""What tasks are made of: a git repository at a commit; and the repositories of rows, whose commits depend on their
files alone.
"""

from __future__ import annotations

import hashlib
import html
import io
import os
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

import httpx

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, describe
from openhands_rl_plugin.core.files import (
    draft_folder,
    file_sha256,
    is_contained,
    locked_folder,
    scratch_folder,
    write_file,
)
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.git import (
    OTHER,
    REPOSITORY,
    GitCommand,
    clone_command,
    git_command,
    git_folder,
    make_git_folder,
    run_git,
)
from openhands_rl_plugin.evals.swe.instances import Instance

_MOST_BYTES = 256 * 1024**2
_WHEN = "@946684800 +0000"


def git_output(command: GitCommand, what: str, stdin: bytes = b"") -> bytes:
    """Run git and return its output. Raises ``ConfigError`` with git's first error line.

    Raises ``InfrastructureError`` at the time limit.
    """
    try:
        return run_git(command, stdin)
    except subprocess.CalledProcessError as error:
        lines = redact_text(error.stderr.decode("utf-8", "replace")).strip().splitlines()
        raise ConfigError(f"{what}: {(lines or [f'git ended with {error.returncode}'])[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{what}: {describe(error)}") from error


class Source(Frozen):
    """A commit of a repository. ``git``: its address, as in rows; ``place``: its git directory on this machine."""

    name: str
    git: str
    place: Path
    commit: str

    def read(self, *words: str, stdin: bytes = b"") -> bytes:
        """Run a git command and return its output. Raises as ``git_output``."""
        return git_output(git_command(self.place, *words), f"git {words[0]} failed in {self.git}", stdin)

    def texts(self, commit: str) -> dict[str, str]:
        """The Python files of a commit and its ``pyproject.toml``, as far as they are UTF-8."""
        wanted: dict[str, str] = {}
        for line in self.read("ls-tree", "-r", "-z", commit).decode("utf-8", "replace").split("\0"):
            meta, _, path = line.partition("\t")
            if meta.startswith("100") and (path.endswith(".py") or path == "pyproject.toml") and is_contained(path):
                wanted[path] = meta.split()[2]
        blobs = "".join(f"{blob}\n" for blob in wanted.values())
        batch, found = io.BytesIO(self.read("cat-file", "--batch", stdin=blobs.encode())), dict[str, str]()
        for path in wanted:
            head = batch.readline().split()
            if len(head) != 3:
                raise ConfigError(f"{self.git} lacks files (is it a partial clone?): give a complete clone")
            with suppress(UnicodeDecodeError):
                found[path] = batch.read(int(head[2]) + 1)[:-1].decode()
        return found


def find_source(where: str, commit: str, cache: Path) -> Source:
    """The repository that a folder is in, or a copy in the cache of one at an HTTP address.

    Raises ``ConfigError`` where there is none, or it has no such commit, and ``InfrastructureError`` without network.
    """
    path = Path(where.removeprefix("file://"))
    if re.match(r"https?://", where):
        place = root = cache / "git" / hashlib.sha256(where.encode()).hexdigest()[:16]
        place.parent.mkdir(parents=True, exist_ok=True)
        if not (place / "HEAD").exists():
            with locked_folder(place.parent), draft_folder(place.parent, f".{place.name}-") as fresh:
                if not (place / "HEAD").exists():
                    try:
                        git_output(clone_command(where, fresh, "--bare"), f"{where} could not be cloned")
                    except ConfigError as error:
                        raise InfrastructureError(str(error)) from error
                    fresh.rename(place)
        name = PurePosixPath(where).name
    else:
        here = path.resolve()
        above = (each for each in (here, *here.parents) if (each / ".git").exists() or (each / "objects").is_dir())
        if not here.is_dir() or (root := next(above, None)) is None:
            raise ConfigError(f"{where} is no folder of a git repository with commits, nor an HTTPS address")
        place, where, name = git_folder(root), str(root), root.name
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name.removesuffix(".git")).strip("._-") or "repository"
    source = Source(name=name, git=where, place=place, commit=commit)
    try:
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
        return source.model_copy(update={"commit": source.read(*words).decode().strip()})
    except ConfigError as error:
        raise ConfigError(f"{where} has no commit {commit} (in {place}): {error}") from None


_TEST_FOLDERS = {"tests", "test", "testing"}
_TEST_FILE = re.compile(r"test_.+\.py|.+_tests?\.py|tests?\.py|conftest\.py")
_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_REQUIREMENT = re.compile(rf"{_NAME} *(\[[\w ,.-]*\])?[ \w.*+!<>=~,()-]*(;[^\n]*)?")


def is_test(path: str) -> bool:
    """Whether a file belongs to the tests."""
    parts = PurePosixPath(path).parts
    return bool(_TEST_FOLDERS & set(parts[:-1])) or bool(_TEST_FILE.fullmatch(parts[-1]))


def requirements_of(texts: Mapping[str, str], more: tuple[str, ...]) -> tuple[str, ...]:
    """``more``, and what ``pyproject.toml`` asks for: files, addresses and options are left out there.

    Raises ``ConfigError`` for one in ``more`` that is no name with versions.
    """
    try:
        declared = tomllib.loads(texts.get("pyproject.toml", "")).get("project", {}).get("dependencies", [])
    except (tomllib.TOMLDecodeError, AttributeError):
        declared = []
    if wrong := [each for each in more if not _REQUIREMENT.fullmatch(each)]:
        raise ConfigError(f"the requirement {wrong[0]!r:.100} is no name with versions: nothing else is installed")
    plain = sorted(each for each in declared if isinstance(each, str) and _REQUIREMENT.fullmatch(each))
    return tuple(dict.fromkeys([*more, *plain]))


# What is read is the commit, else the work tree; then the patches on stdin are taken back.
_BASE = r"""
if [ -n "$1" ]; then
  git read-tree "$1"
  git ls-files -s -z | sed -zn 's/^160000 [^\t]*\t//p' | git update-index -z --force-remove --stdin
else
  git add --all --force
fi
cat >/tmp/patch
[ ! -s /tmp/patch ] || git apply --cached --reverse /tmp/patch
made=$(git commit-tree "$(git write-tree)" -m "$2")
[ -z "$1" ] || echo "$made" | git pack-objects --quiet --revs "$OTHER/objects/pack/pack" >/dev/null
echo "$made"
"""


def commit_files(git: Path, work: Path | Source, message: str, *, patch: str = "", who: str = "swe-local") -> str:
    """Make ``main`` of the git directory ``git``, which is made, the one commit, without a parent, of the files of a
    folder or of another commit, before ``patch``; its hash.

    Raises ``ConfigError`` when the patch was never applied to it, and without bubblewrap.
    """
    make_git_folder(git, bare=git.name != ".git")
    write_file(git / "info" / "attributes", "* -text -ident -filter\n", parents=True)  # files as they are
    given = {"NAME": who, "EMAIL": f"{who}@localhost", "DATE": _WHEN}
    variables = {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER") for part, value in given.items()}
    if isinstance(work, Source):
        variables |= {"OTHER": OTHER, "GIT_INDEX_FILE": "/tmp/index", "GIT_OBJECT_DIRECTORY": f"{OTHER}/objects"}
        variables |= {"GIT_ALTERNATE_OBJECT_DIRECTORIES": f"{REPOSITORY}/objects"}
        words = (work.place, work.commit, message)
        command = git_command(*words, script=_BASE, other=git, variables=variables)
    else:
        command = git_command(git, "", message, script=_BASE, work=work, writable=True, variables=variables)
    made = git_output(command, f"{message} could not be committed", patch.encode()).decode().strip()
    (git / "refs" / "heads" / "main").write_text(f"{made}\n")
    return made


def task_repository(instance: Instance, cache: Path) -> Path | None:
    """The repository of a row with a ``source``, else ``None``. The source is a commit of a git repository, or of the
    published suite the source archive of a release, known by its sha256.

    The row's patches are taken back in the source's files, which gives ``base_commit``. Raises ``InfrastructureError``
    without network, and where the row or its source was changed.
    """
    source = instance.extra.get("source")
    if not isinstance(source, dict):
        return None
    texts = {name: str(value) for name, value in source.items()}
    place = cache / "task-repositories" / f"{instance.instance_id}-{instance.base_commit[:12]}.git"
    head = place / "refs/heads/main"
    if head.exists() and head.read_text().strip() == instance.base_commit:
        return place
    patch = "".join(f"{each.rstrip('\n')}\n" for each in (instance.patch, instance.test_patch) if each)
    label = texts.get("label", "")
    if {"git", "commit"} <= texts.keys():
        found = find_source(texts["git"], texts["commit"], cache)
        if found.commit == instance.base_commit:
            return found.place
        base = commit_files(place, found, label or found.name, patch=patch)
    else:
        with scratch_folder("sdist") as folder:
            base = commit_files(place, extract(fetch_archive(texts, cache), folder), label, patch=patch)
    if base != instance.base_commit:
        raise InfrastructureError(
            f"{instance.instance_id}: its source and patches give commit {base[:12]}, not"
            f" {instance.base_commit[:12]}; the row, or the source, has been changed"
        )
    return place


def fetch_archive(source: Mapping[str, str], cache: Path) -> Path:
    """The source archive of a release, from the package index (``UV_DEFAULT_INDEX``, ``PIP_INDEX_URL``, else PyPI).

    Raises ``ConfigError`` for a source of another kind, ``InfrastructureError`` without network.
    """
    name, sha256 = source.get("sdist", ""), source.get("sha256", "")
    if not re.fullmatch(_NAME, name) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ConfigError(f"a source of an unknown kind: {', '.join(sorted(source))}")
    archive = cache / "archives" / f"{sha256}.tar.gz"
    if not archive.exists():
        index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
        try:
            with httpx.Client(follow_redirects=True, timeout=60) as client:
                page = client.get(f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/").raise_for_status()
                link = re.search(rf'href="([^"#]+)#sha256={sha256}"', page.text)
                if link is None:
                    raise InfrastructureError(f"{source.get('label') or name}: the package index has no such archive")
                data = client.get(urljoin(str(page.url), html.unescape(link[1]))).raise_for_status().content
        except httpx.HTTPError as error:
            raise InfrastructureError(f"{name} could not be fetched: {describe(error)}") from error
        write_file(archive, data, parents=True)
    if file_sha256(archive) != sha256:
        archive.unlink()
        raise InfrastructureError(f"{name}: the archive has another sha256 than the pinned {sha256}")
    return archive


def extract(archive: Path, folder: Path) -> Path:
    """The top folder of an archive, with its regular files. Raises ``ConfigError`` for what is none."""
    try:
        with tarfile.open(archive) as file:
            members = [each for each in file if each.isfile()]
            if sum(each.size for each in members) > _MOST_BYTES:
                raise ConfigError(f"{archive} has more than {_MOST_BYTES // 1024**2} MB")
            file.extractall(folder, members, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{archive} is no source archive that can be read: {describe(error)}") from error
    return next(folder.iterdir())
