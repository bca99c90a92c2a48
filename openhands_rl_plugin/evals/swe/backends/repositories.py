"""Where an instance's repository comes from: a folder of mirrors, or a clone.

Whatever the source, ``make_origin`` writes a repository that holds the base commit and its ancestors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.git import (
    OTHER,
    REPOSITORY,
    checked_git,
    clone_command,
    git_command,
    make_git_folder,
)
from openhands_rl_plugin.environments.workspace.processes import run
from openhands_rl_plugin.evals.swe.backends.caching import made
from openhands_rl_plugin.evals.swe.types import Instance

BRANCH = "main"
ORIGIN_INSIDE = "/var/lib/repository/origin.git"


class RepositorySource(Protocol):
    """Finds the repositories of instances."""

    async def find(self, instance: Instance) -> Path | None:
        """A git directory that holds the base commit, or ``None``. Raises ``InfrastructureError``."""
        ...


class MirrorSource:
    """A folder of git directories, named ``owner/name.git`` or ``owner__name.git``; ``clone``: what is missing in it is
    cloned from GitHub.
    """

    def __init__(self, folder: Path, *, clone: bool = False) -> None:
        self._folder, self._clone = folder.expanduser().resolve(), clone

    async def find(self, instance: Instance) -> Path | None:
        """The mirror; ``None`` when there is none that holds the commit. Raises ``InfrastructureError``."""
        url, place = f"https://github.com/{instance.repo}.git", self._folder / f"{instance.repo.replace('/', '__')}.git"

        async def make(into: Path) -> None:
            await checked_git(clone_command(url, into, "--mirror"), f"clone {url}")

        if self._clone:
            await made(place, make)
        for git in (self._folder / f"{instance.repo}.git", place):
            if (git / "HEAD").exists() and await has_commit(git, instance.base_commit):
                return git
        if self._clone:
            raise InfrastructureError(
                f"{place} has no commit {instance.base_commit[:12]}; delete it if it is too old, and it is cloned again"
            )
        return None


async def find_repository(instance: Instance, sources: Sequence[RepositorySource]) -> Path:
    """The first git directory that holds the instance's base commit. Raises ``InfrastructureError``."""
    for source in sources:
        if (found := await source.find(instance)) is not None:
            return found
    raise InfrastructureError(
        f"{instance.instance_id}: no repository {instance.repo} with commit {instance.base_commit[:12]}; "
        "name a folder of mirrors that has it"
    )


async def make_origin(git: Path, instance: Instance, origin: Path, branch: str) -> None:
    """Write a git directory with the base commit as ``branch``, its ancestors, and the tags on these.

    Raises ``InfrastructureError``.
    """
    what, commit = f"{instance.repo} at {instance.base_commit[:12]}", instance.base_commit
    make_git_folder(origin, branch)
    listed = git_command(git, "for-each-ref", f"--merged={commit}", "--format=%(objectname) %(refname)", "refs/tags")
    tags = (await checked_git(listed, what)).text.splitlines()
    wanted = "".join(f"{name}\n" for name in (commit, *(line.split()[0] for line in tags)))
    words = ("pack-objects", "--quiet", "--revs", "--delta-base-offset", "--threads=2", f"{OTHER}/objects/pack/pack")
    places = {"GIT_OBJECT_DIRECTORY": f"{OTHER}/objects", "GIT_ALTERNATE_OBJECT_DIRECTORIES": f"{REPOSITORY}/objects"}
    pack = git_command(git, *words, other=origin, variables=places)
    await checked_git(pack, what, wanted.encode())
    refs = sorted([f"{commit} refs/heads/{branch}", *tags], key=lambda line: line.split()[1])
    (origin / "packed-refs").write_text("# pack-refs with: sorted \n" + "".join(f"{line}\n" for line in refs))


async def has_commit(git: Path, commit: str) -> bool:
    """Whether the git directory holds that commit."""
    command = git_command(git, "cat-file", "-e", f"{commit}^{{commit}}")
    return (await run(command.words, variables=command.variables)).code == 0


async def file_at(git: Path, commit: str, path: str) -> str | None:
    """A file's text at a commit, or ``None``."""
    command = git_command(git, "cat-file", "blob", f"{commit}:{path}")
    shown = await run(command.words, variables=command.variables)
    return None if shown.code else shown.text
