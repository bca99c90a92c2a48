"""Reproducible git repositories: commits depend on files only, so that a task has the same ``base_commit`` anywhere."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.tasks.sources.trees import PLAIN, SourceTree, TreeFile, bounded

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
