"""The user's repository: where it lies, and which commit the tasks are made of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.packages import package_name


class OwnRepository(Frozen):
    """``root``: the top folder of the work tree. ``uncommitted``: files with changes that no commit has."""

    root: Path
    name: str
    commit: str
    uncommitted: int = 0

    def times(self, commits: Iterable[str]) -> dict[str, int]:
        """Commit -> when it was committed, in Unix seconds."""
        git = GitRepository(self.root)
        return {each: int(git.text("show", "-s", "--format=%ct", each)) for each in commits}


def find_repository(path: Path, commit: str = "HEAD") -> OwnRepository:
    """The repository that ``path`` is in. Raises ``ConfigError`` where there is none, or it has no such commit."""
    if not path.is_dir():
        raise ConfigError(f"--repo {path}: there is no such folder")
    here = GitRepository(path.resolve())
    try:
        here.git("rev-parse", "--git-dir")
    except ConfigError as error:
        if "not a git repository" not in str(error):
            raise
        raise ConfigError(
            f"--repo {path} is no git repository: tasks are made of commits; run `git init`, `git add` and "
            "`git commit` in it, or give another folder"
        ) from error
    bare = here.text("rev-parse", "--is-bare-repository").strip() == "true"
    root = path.resolve() if bare else Path(here.text("rev-parse", "--show-toplevel").rstrip("\n"))
    git = GitRepository(root)
    try:
        found = git.text("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").strip()
    except ConfigError as error:
        missing = "no commit yet (`git add`, `git commit`)" if commit == "HEAD" else f"no commit {commit}"
        raise ConfigError(f"--repo {path} has {missing}: tasks are made of commits") from error
    # Without its locks git writes nothing into a repository that is only looked at.
    status = ("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    changed = 0 if bare else len(git.text(*status).splitlines())
    return OwnRepository(root=root, name=package_name(root), commit=found, uncommitted=changed)


def repository_lines(repository: OwnRepository, newest: str) -> list[str]:
    """Which commit the tasks are of; ``newest``: the commit that is checked out by now."""
    told = [f"{repository.name}: commit {repository.commit[:12]} of {repository.root}"]
    if newest != repository.commit:
        told.append(f"  the repository is at {newest[:12]} by now: --fresh makes tasks of that")
    if repository.uncommitted:
        told.append(f"  {repository.uncommitted} files with uncommitted changes: tasks are made of what is committed")
    return told
