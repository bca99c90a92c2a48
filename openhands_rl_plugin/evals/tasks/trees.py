"""Trees of files, and git repositories whose commits depend on the files alone."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, describe
from openhands_rl_plugin.core.files import is_contained, scratch_folder
from openhands_rl_plugin.environments.workspace.git import OTHER, git_command, git_folder, make_git_folder, run_git

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
        """Write all files below ``directory``, which is made. Raises ``ConfigError`` for names that leave it."""
        self.check(str(directory))
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

    def check(self, what: str) -> None:
        """Raise ``ConfigError`` for a file that would lie elsewhere: by its name, or below a link or another file."""
        for path in self.files:
            above = (str(parent) for parent in PurePosixPath(path).parents)
            if not is_contained(path) or any(parent in self.files for parent in above):
                raise ConfigError(f"{what}: the file name {path!r} leaves the folder, or is one of git's own")


def read_archive(path: Path) -> SourceTree:
    """The files of a ``.tar.gz`` below its one top folder. Raises ``ConfigError`` for what is none."""
    files: dict[str, TreeFile] = {}
    total = 0
    try:
        with tarfile.open(path, tarinfo=_Header) as archive:
            for at, member in enumerate(archive):
                total += member.size
                check_size(at, total, str(path))
                name = member.name.partition("/")[2]
                if member.isfile() and is_contained(name) and (stream := archive.extractfile(member)) is not None:
                    files[name] = TreeFile(EXECUTABLE if member.mode & 0o100 else PLAIN, stream.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{path} is no source archive that can be read: {error}") from error
    return bounded(SourceTree({name: files[name] for name in sorted(files)}), str(path))


def bounded(tree: SourceTree, what: str) -> SourceTree:
    """``tree``. Raises ``ConfigError`` when it is empty, larger than a task's repository may be, or has wrong names."""
    if not tree.files:
        raise ConfigError(f"{what} holds no files")
    tree.check(what)
    check_size(len(tree.files), sum(len(file.data) for file in tree.files.values()), what)
    return tree


def check_size(files: int, size: int, what: str) -> None:
    """Raise ``ConfigError`` for more files or bytes than a task's repository may have."""
    if files > MOST_FILES or size > MOST_BYTES:
        raise ConfigError(
            f"{what} has more than {MOST_FILES} files or {MOST_BYTES // 1024**2} MB; take a smaller package"
        )


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises ``ConfigError`` before a long name, or what else an archive has beside files, is read into memory."""
        found = super().frombuf(buf, encoding, errors)
        check_size(0, found.size, "the archive")
        return found


_WHO, _MAIL = "swe-local", "swe-local@localhost"
_WHEN = "946684800 +0000"
_TAKE_BACK = """
export GIT_INDEX_FILE=/tmp/index
shopt -s nullglob
git read-tree "$2"
for patch in "$OTHER"/*; do git apply --cached --reverse "$patch"; done
made=$(git commit-tree "$(git write-tree)" -m "$3")
git update-ref "refs/heads/$4" "$made"
echo "$made"
"""
_COMMIT = "git add --all --force; git commit --quiet --no-verify --message=start; git rev-parse HEAD"


class GitRepository:
    """A git repository, bare or with a work tree, that somebody else may have written to: it is only read, unless it
    was created here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created = False

    @classmethod
    def create(cls, path: Path) -> GitRepository:
        """An empty bare one at ``path``, or the one that was created there."""
        if not (path / "HEAD").exists():
            make_git_folder(path)
        repository = cls(path)
        repository._created = True
        return repository

    def commit(self, tree: SourceTree, message: str, branch: str) -> str:
        """Make ``branch`` the one commit, without a parent, that holds ``tree``; its hash."""
        text = (message.rstrip("\n") + "\n").encode()
        head = f"commit refs/heads/{branch}\ncommitter {_WHO} <{_MAIL}> {_WHEN}\ndata {len(text)}\n".encode()
        stream = [b"reset refs/heads/%s\n" % branch.encode(), head, text, b"\ndeleteall\n"]
        for path, file in sorted(tree.files.items()):
            stream += [f"M {file.mode} inline {_quoted(path)}\ndata {len(file.data)}\n".encode(), file.data, b"\n"]
        self.git("fast-import", "--quiet", "--force", stdin=b"".join(stream))
        return self.text("rev-parse", f"refs/heads/{branch}").strip()

    def diff(self, old: str, new: str) -> str:
        """The patch from one commit to another. Raises ``UnicodeDecodeError`` for one that is no text."""
        options = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-color", "--diff-algorithm=myers")
        return self.git("diff", *options, "--src-prefix=a/", "--dst-prefix=b/", old, new, "--").decode()

    def without(self, commit: str, patches: tuple[str, ...], message: str, branch: str) -> str:
        """Revert ``patches`` in a commit, in this order, and commit the result. Returns its hash.

        Raises ``ConfigError`` when one was never applied to it.
        """
        with scratch_folder("trees") as folder:
            for at, patch in enumerate(filter(None, patches)):
                Path(folder, f"{at}.diff").write_text(patch, encoding="utf-8", newline="")
            words = ("revert", commit, message.rstrip("\n"), branch)
            variables = {**_identity(_WHO, _MAIL), "OTHER": OTHER}
            made = self.git(*words, script=_TAKE_BACK, other=Path(folder), variables=variables)
        return made.decode().strip()

    def tree(self, commit: str) -> SourceTree:
        """All files of a commit, without submodules. Raises ``ConfigError`` for an unknown one, and a too large one."""
        listed = self.text("ls-tree", "-r", "-l", "-z", "--end-of-options", commit).split("\0")
        parts = [(*meta.split(), path) for meta, _, path in (line.partition("\t") for line in listed if line)]
        what = f"{self.path} at {commit[:12]}"
        try:
            entries = [(mode, blob, int(size), path) for mode, kind, blob, size, path in parts if kind == "blob"]
        except ValueError as error:
            raise ConfigError(f"{what} lacks files (is it a partial clone?): give a complete clone") from error
        check_size(len(entries), sum(size for _, _, size, _ in entries), what)
        answer = self.git("cat-file", "--batch", stdin="".join(f"{blob}\n" for _, blob, _, _ in entries).encode())
        files, at = {}, 0
        for mode, _, size, path in entries:
            start = answer.index(b"\n", at) + 1
            files[path] = TreeFile(mode, answer[start : start + size])
            at = start + size + 1
        return bounded(SourceTree(files), what)

    def text(self, *arguments: str, **options: Any) -> str:
        """What a git command prints."""
        return self.git(*arguments, **options).decode("utf-8", "replace")

    def git(self, *arguments: str, stdin: bytes = b"", **options: Any) -> bytes:
        """Run git on this repository, as ``git_command`` does. Raises ``ConfigError`` with git's message."""
        command = git_command(git_folder(self.path), *arguments, writable=self._created, **options)
        try:
            return run_git(command, stdin)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {error.returncode}"]
            raise ConfigError(f"git {arguments[0]} failed in {self.path}: {lines[0]}") from error
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"git {arguments[0]} took more than {error.timeout} s in {self.path}") from error


def _identity(name: str, mail: str) -> dict[str, str]:
    values = (("NAME", name), ("EMAIL", mail), ("DATE", f"@{_WHEN}"))
    return {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER") for part, value in values}


def _quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def make_repository(tree: SourceTree, directory: Path) -> str:
    """Write the files to ``directory``, which is made, and commit them; the commit's hash.

    Raises ``ConfigError`` for names that leave it, and without bubblewrap; ``InfrastructureError`` when it fails.
    """
    tree.write(directory)
    make_git_folder(directory / ".git", bare=False)
    variables = _identity("repair", "repair@localhost")
    command = git_command(directory / ".git", script=_COMMIT, work=directory, writable=True, variables=variables)
    try:
        return run_git(command).decode().strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise InfrastructureError(f"{directory} could not be committed: {describe(error)}") from error


def apply_patch(tree: SourceTree, patch: str, folder: Path) -> str:
    """Write the files to ``repository`` below ``folder`` and apply a patch; why it could not be applied, else nothing.

    Raises ``InfrastructureError``.
    """
    tree.write(folder / "repository")
    (folder / "patch.diff").write_text(patch, encoding="utf-8")
    script = 'cd "$1/repository"; git apply --whitespace=nowarn ../patch.diff'
    try:
        run_git(git_command(None, OTHER, script=script, other=folder))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines()
        return (lines or ["git apply failed"])[-1][:300]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"the patch could not be tried: {describe(error)}") from error
    return ""
