"""Where an instance's repository comes from: a folder of mirrors, a clone, or the archive that its row names.

Whatever it is, what leaves here holds the base commit and its ancestors alone: an ``Origin``.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from openhands_rl_plugin.errors import InfrastructureError
from openhands_rl_plugin.swe.caching import Cache
from openhands_rl_plugin.swe.processes import checked, run
from openhands_rl_plugin.swe.types import Instance

BRANCH = "main"
STORE_INSIDE = "/var/lib/repository/store.git"
ORIGIN_INSIDE = "/var/lib/repository/origin.git"
_CLONE_TIME = 3600.0


class Origin(NamedTuple):
    """What the official scripts clone from. ``origin`` borrows all its objects from ``store``, so that repacking a
    clone of it costs nothing.
    """

    origin: Path
    store: Path


class RepositorySource(Protocol):
    """A place where repositories are found."""

    async def find(self, instance: Instance) -> Path | None:
        """A git directory that holds the base commit, or ``None``. Raises ``InfrastructureError``."""
        ...


class MirrorSource:
    """A folder of git directories, named as GitHub's mirrors usually are: ``owner/name.git``, ``owner__name``, ..."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().resolve()

    async def find(self, instance: Instance) -> Path | None:
        """The mirror, whether bare or with a work tree; ``None`` when the folder has none that holds the commit."""
        for path in _spellings(self._folder, instance.repo):
            git = next((each for each in (path / ".git", path / "repo", path) if (each / "HEAD").exists()), None)
            if git is not None and await has_commit(git, instance.base_commit):
                return git
        return None


class CloneSource:
    """Clones, kept in the cache; ``url`` holds ``{repo}``."""

    def __init__(self, cache: Cache, url: str = "https://github.com/{repo}.git") -> None:
        self._cache, self._url = cache, url

    async def find(self, instance: Instance) -> Path | None:
        """The clone, made or brought up to date when it lacks the commit."""
        url = self._url.format(repo=instance.repo)
        clone = self._cache.path("clones", instance.repo.lower().replace("/", "__") + ".git")

        async def make(into: Path) -> None:
            await checked(["git", "clone", "--mirror", "--", url, str(into)], f"clone {url}", timeout=_CLONE_TIME)

        await self._cache.made(clone, make)
        if not await has_commit(clone, instance.base_commit):
            async with self._cache.locked(clone):
                fetch = _git(clone, "fetch", "--prune", "origin", "+refs/*:refs/*")
                await checked(fetch, f"fetch {url}", timeout=_CLONE_TIME)
        return clone if await has_commit(clone, instance.base_commit) else None


async def find_repository(instance: Instance, sources: Sequence[RepositorySource]) -> Path:
    """The first git directory that holds the instance's base commit. Raises ``InfrastructureError``."""
    for source in sources:
        if (found := await source.find(instance)) is not None:
            return found
    raise InfrastructureError(
        f"{instance.instance_id}: no repository {instance.repo} with commit {instance.base_commit[:12]}; "
        "name a folder of mirrors that has it"
    )


async def make_origin(git: Path, instance: Instance, into: Path, branches: Sequence[str]) -> None:
    """Write ``into/origin.git`` and ``into/store.git``: the base commit under ``branches``, its ancestors, and the
    tags on these. Takes about a second for 25,000 commits. Raises ``InfrastructureError``.
    """
    store, origin = into / "store.git", into / "origin.git"
    what = f"{instance.repo} at {instance.base_commit[:12]}"
    for folder in (store, origin):
        await checked(["git", "init", "--quiet", "--bare", f"--initial-branch={branches[0]}", str(folder)], what)
        shutil.rmtree(folder / "hooks", ignore_errors=True)
    listed = _git(git, "for-each-ref", f"--merged={instance.base_commit}", "--format=%(objectname) %(refname)")
    tags = (await checked([*listed, "refs/tags"], what)).text.splitlines()
    wanted = [instance.base_commit, *(line.split()[0] for line in tags)]
    pack = _git(git, "pack-objects", "--quiet", "--revs", "--delta-base-offset", "--threads=2")
    await checked(
        [*pack, str(store / "objects" / "pack" / "pack")],
        what,
        given="\n".join(wanted).encode() + b"\n",
        timeout=_CLONE_TIME,
    )
    (origin / "objects" / "info").mkdir(exist_ok=True)
    (origin / "objects" / "info" / "alternates").write_text(f"{STORE_INSIDE}/objects\n")
    refs = [f"{instance.base_commit} refs/heads/{branch}" for branch in branches]
    # As a packed file: thousands of tags are written at once, and nothing has to be looked up in the store.
    packed = "".join(f"{line}\n" for line in sorted([*refs, *tags], key=lambda line: line.split()[1]))
    (origin / "packed-refs").write_text("# pack-refs with: sorted \n" + packed)
    (store / "packed-refs").write_text(f"{refs[0]}\n")


async def has_commit(git: Path, commit: str) -> bool:
    """Whether the git directory holds that commit."""
    return (await run(_git(git, "cat-file", "-e", f"{commit}^{{commit}}"))).code == 0


async def file_at(git: Path, commit: str, path: str) -> str | None:
    """A file's text at a commit, or ``None``."""
    shown = await run(_git(git, "show", f"{commit}:{path}"))
    return None if shown.code else shown.text


def _git(git: Path, *words: str) -> list[str]:
    return ["git", "-c", "safe.directory=*", f"--git-dir={git}", *words]


def _spellings(folder: Path, repo: str) -> list[Path]:
    owner, _, name = repo.partition("/")
    names = [f"{owner}/{name}", f"{owner}__{name}", f"{owner}+{name}", f"{owner}-{name}", name]
    spelt = [folder / f"{each}{suffix}" for each in names for suffix in ("", ".git")]
    lower = [folder / f"{each.lower()}{suffix}" for each in names for suffix in ("", ".git")]
    return list(dict.fromkeys(spelt + lower))
