"""Trees of files, and git repositories whose commits depend on the files alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError

MOST_FILES, MOST_BYTES = 20_000, 256 * 1024**2
PLAIN, EXECUTABLE, LINK = "100644", "100755", "120000"


@dataclass(frozen=True)
class TreeFile:
    """A file with its mode as git writes it; the data of a link is its target."""

    mode: str
    data: bytes


@dataclass(frozen=True)
class SourceTree:
    """Files by their path from the root, with ``/`` between the parts."""

    files: Mapping[str, TreeFile]

    def text(self, path: str) -> str | None:
        """The text of a file; ``None`` when there is none, or it is no UTF-8."""
        found = self.files.get(path)
        if found is None or found.mode == LINK:
            return None
        try:
            return found.data.decode()
        except UnicodeDecodeError:
            return None

    def changed(self, changes: Mapping[str, str | None]) -> SourceTree:
        """This tree with other texts at some paths; ``None`` removes the file."""
        files = dict(self.files)
        for path, text in changes.items():
            if text is None:
                files.pop(path, None)
            else:
                mode = files[path].mode if path in files else PLAIN
                files[path] = TreeFile(mode, text.encode())
        return SourceTree(files)

    def write(self, directory: Path) -> None:
        """Write all files below ``directory``, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        made: set[Path] = set()
        for path, file in self.files.items():
            target = directory / path
            if target.parent not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            if file.mode == LINK:
                target.symlink_to(os.fsdecode(file.data))
                continue
            target.write_bytes(file.data)
            if file.mode == EXECUTABLE:
                target.chmod(0o755)


def read_archive(path: Path) -> SourceTree:
    """The files of a ``.tar.gz`` or ``.zip`` below its one top folder. Raises ``ConfigError`` for what is none."""
    try:
        members = dict(_zip_members(path) if zipfile.is_zipfile(path) else _tar_members(path))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise ConfigError(f"{path} is no source archive that can be read: {error}") from error
    files = {name.partition("/")[2]: file for name, file in members.items() if name.find("/") > 0}
    return bounded(SourceTree({name: files[name] for name in sorted(files) if _is_inside(name)}), str(path))


def bounded(tree: SourceTree, what: str) -> SourceTree:
    """``tree``. Raises ``ConfigError`` when it is empty, or larger than a task's repository may be."""
    if not tree.files:
        raise ConfigError(f"{what} holds no files")
    if len(tree.files) > MOST_FILES or sum(len(file.data) for file in tree.files.values()) > MOST_BYTES:
        raise ConfigError(
            f"{what} has more than {MOST_FILES} files or {MOST_BYTES // 1024**2} MB; take a smaller package"
        )
    return tree


def _tar_members(path: Path) -> Iterator[tuple[str, TreeFile]]:
    with tarfile.open(path) as archive:
        total = 0
        for member in archive:
            total += member.size
            if total > MOST_BYTES:
                raise ConfigError(f"{path} unpacks to more than {MOST_BYTES // 1024**2} MB; take a smaller package")
            if member.isfile() and (stream := archive.extractfile(member)) is not None:
                yield member.name, TreeFile(EXECUTABLE if member.mode & 0o100 else PLAIN, stream.read())


def _zip_members(path: Path) -> Iterator[tuple[str, TreeFile]]:
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
            raise ConfigError(f"{path} unpacks to more than {MOST_BYTES // 1024**2} MB; take a smaller package")
        for info in archive.infolist():
            if not info.is_dir():
                yield info.filename, TreeFile(PLAIN, archive.read(info))


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and ".git" not in parts and "\n" not in name


_WHO = "swe-local <swe-local@localhost>"
_WHEN = "946684800 +0000"


class GitRepository:
    """A bare git repository. The user's git configuration is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> GitRepository:
        """An empty one at ``path``, or the one that is there. Raises ``ConfigError`` without git."""
        repository = cls(path)
        if not (path / "HEAD").exists():
            path.mkdir(parents=True, exist_ok=True)
            repository.git("init", "--quiet", "--bare", "--initial-branch=main", ".")
        return repository

    def commit(self, tree: SourceTree, message: str, branch: str) -> str:
        """Make ``branch`` the one commit, without a parent, that holds ``tree``; its hash."""
        said = (message.rstrip("\n") + "\n").encode()
        head = f"commit refs/heads/{branch}\ncommitter {_WHO} {_WHEN}\ndata {len(said)}\n".encode()
        stream = [b"reset refs/heads/%s\n" % branch.encode(), head, said, b"\ndeleteall\n"]
        for path, file in sorted(tree.files.items()):
            stream += [f"M {file.mode} inline {_quoted(path)}\ndata {len(file.data)}\n".encode(), file.data, b"\n"]
        self.git("fast-import", "--quiet", "--force", stdin=b"".join(stream))
        return self.text("rev-parse", f"refs/heads/{branch}").strip()

    def diff(self, old: str, new: str, paths: Iterable[str] = ()) -> str:
        """The patch from one commit to another, of all files or ``paths``.

        Raises ``UnicodeDecodeError`` for one that is no text.
        """
        options = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-color", "--diff-algorithm=myers")
        literal = [f":(top,literal){path}" for path in paths]
        return self.git("diff", *options, "--src-prefix=a/", "--dst-prefix=b/", old, new, "--", *literal).decode()

    def without(self, commit: str, patches: tuple[str, ...], message: str, branch: str) -> str:
        """Revert ``patches`` in a commit, in this order, and commit the result. Returns its hash.

        Raises ``ConfigError`` when one was never applied to it.
        """
        with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            self.git("read-tree", commit, variables=index)
            for patch in filter(None, patches):
                self.git("apply", "--cached", "--reverse", "-", stdin=patch.encode(), variables=index)
            tree = self.git("write-tree", variables=index).decode().strip()
        made = self.git("commit-tree", tree, "-m", message.rstrip("\n"), variables=_identity()).decode().strip()
        self.git("update-ref", f"refs/heads/{branch}", made)
        return made

    def tree(self, commit: str) -> SourceTree:
        """All files of a commit, without submodules. Raises ``ConfigError`` for an unknown one."""
        entries = [
            (meta.split()[0], meta.split()[2], path)
            for meta, _, path in (
                line.partition("\t") for line in self.text("ls-tree", "-r", "-z", commit).split("\0") if line
            )
            if meta.split()[1] == "blob"
        ]
        answer = self.git("cat-file", "--batch", stdin="".join(f"{blob}\n" for _, blob, _ in entries).encode())
        files, at = {}, 0
        for mode, _, path in entries:
            end = answer.index(b"\n", at)
            size = int(answer[at:end].split()[2])
            files[path] = TreeFile(mode or PLAIN, answer[end + 1 : end + 1 + size])
            at = end + size + 2
        return bounded(SourceTree(files), f"{self.path} at {commit[:12]}")

    def text(self, *arguments: str) -> str:
        """What a git command prints."""
        return self.git(*arguments).decode("utf-8", "replace")

    def git(self, *arguments: str, stdin: bytes = b"", variables: Mapping[str, str] | None = None) -> bytes:
        """Run git on this repository. Raises ``ConfigError`` with git's message, or without git."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.path), "LC_ALL": "C"}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
        command = ["git", "-c", "safe.directory=*", "-C", str(self.path), *arguments]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, env={**environment, **(variables or {})}, timeout=600
            )
        except FileNotFoundError as error:
            raise ConfigError("git is not installed; tasks are kept in git repositories") from error
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"git {arguments[0]} took more than 600 s in {self.path}") from error
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
            raise ConfigError(f"git {arguments[0]} failed in {self.path}: {said[0]}")
        return done.stdout


def _identity() -> dict[str, str]:
    name, _, mail = _WHO.rstrip(">").partition(" <")
    return {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", name), ("EMAIL", mail), ("DATE", f"@{_WHEN}"))
    }


def _quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


_STARTED = "2000-01-01T00:00:00 +0000"


def make_repository(tree: SourceTree, directory: Path) -> str:
    """Write the files to ``directory``, which is made, and commit them; the commit's hash.

    Raises ``ConfigError`` without git, ``InfrastructureError`` when it fails.
    """
    tree.write(directory)
    _git(directory, "init", "--quiet", "--initial-branch=main")
    _git(directory, "add", "--all", "--force")
    _git(directory, "commit", "--quiet", "--no-verify", "--message=start")
    return _git(directory, "rev-parse", "HEAD").strip()


def commit_of(files: Mapping[str, str]) -> str:
    """The hash that ``make_repository`` would return."""
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
        return make_repository(SourceTree({}).changed(files), Path(folder) / "repository")


def apply_patch(tree: SourceTree, patch: str, folder: Path) -> str:
    """Write the files to ``repository`` below ``folder`` and apply a patch; why it could not be applied, else nothing.

    Raises ``InfrastructureError``.
    """
    tree.write(folder / "repository")
    (folder / "patch.diff").write_text(patch, encoding="utf-8")
    command = ["git", "apply", "--whitespace=nowarn", "../patch.diff"]
    variables = {**_plain_variables(), "GIT_CEILING_DIRECTORIES": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder / "repository", capture_output=True, errors="replace", timeout=60, env=variables
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{shlex.join(command)}: {error}") from error
    return (done.stderr.strip().splitlines() or ["git apply failed"])[-1][:300] if done.returncode else ""


def _plain_variables() -> dict[str, str]:
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C", "HOME": os.devnull}
    return {"PATH": os.environ.get("PATH", os.defpath), **settings}


def _git(directory: Path, *words: str) -> str:
    identity = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", "repair"), ("EMAIL", "repair@localhost"), ("DATE", _STARTED))
    }
    variables = {**_plain_variables(), **identity}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-C", str(directory), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    except FileNotFoundError as error:
        raise ConfigError("git is not installed; tasks are git repositories") from error
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"git {words[0]} took more than 60 s in {directory}") from error
    if done.returncode:
        raise InfrastructureError(f"git {words[0]} failed in {directory}: {done.stderr.strip()[:200]}")
    return done.stdout
