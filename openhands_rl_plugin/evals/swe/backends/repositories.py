"""Where an instance's repository comes from: a folder of mirrors, a clone, or the archive that its row names.

Whatever the source, ``make_origin`` writes a repository that holds the base commit and its ancestors only.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.processes import checked, run
from openhands_rl_plugin.evals.swe.backends.caching import Cache, link_files
from openhands_rl_plugin.evals.swe.types import Instance

BRANCH = "main"
STORE_INSIDE = "/var/lib/repository/store.git"
ORIGIN_INSIDE = "/var/lib/repository/origin.git"
_CLONE_TIME = 3600.0
_MOST_FILES = 60
"""Maximum of pack files for one commit, before everything is repacked."""


class RepositorySource(Protocol):
    """Finds the repositories of instances."""

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
        """The clone, made or updated when it lacks the commit."""
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


async def make_origin(cache: Cache, git: Path, instance: Instance, into: Path, branches: Sequence[str]) -> None:
    """Write ``into/origin.git`` and ``into/store.git``: the base commit under ``branches``, its ancestors, and the
    tags on these. The origin borrows all its objects from the store, so that repacking a clone costs nothing.
    What instances of a repository share is packed once. Raises ``InfrastructureError``.
    """
    store, origin = into / "store.git", into / "origin.git"
    what = f"{instance.repo} at {instance.base_commit[:12]}"
    for folder in (store, origin):
        await checked(["git", "init", "--quiet", "--bare", f"--initial-branch={branches[0]}", str(folder)], what)
        shutil.rmtree(folder / "hooks", ignore_errors=True)
    listed = _git(git, "for-each-ref", f"--merged={instance.base_commit}", "--format=%(objectname) %(refname)")
    tags = (await checked([*listed, "refs/tags"], what)).text.splitlines()
    past = await _past(git, instance.base_commit, what)
    packs = store / "objects" / "pack"
    if past:
        link_files(await _packed_past(cache, git, instance.repo, past, what), packs)
    await _pack(git, [instance.base_commit, *(line.split()[0] for line in tags)], [past] if past else [], packs, what)
    (origin / "objects" / "info").mkdir(exist_ok=True)
    (origin / "objects" / "info" / "alternates").write_text(f"{STORE_INSIDE}/objects\n")
    refs = [f"{instance.base_commit} refs/heads/{branch}" for branch in branches]
    # As a packed file: thousands of tags are written at once, and nothing has to be looked up in the store.
    packed = "".join(f"{line}\n" for line in sorted([*refs, *tags], key=lambda line: line.split()[1]))
    (origin / "packed-refs").write_text("# pack-refs with: sorted \n" + packed)
    (store / "packed-refs").write_text(f"{refs[0]}\n")


async def _past(git: Path, commit: str, what: str) -> str:
    """The last ancestor, along first parents, from before the quarter of the year in which ``commit`` was made; empty
    when there is none. Commits of one quarter have it in common.
    """
    made = (await checked(_git(git, "log", "-1", "--format=%cd", "--date=format:%Y %m", commit), what)).text.split()
    begins = f"{made[0]}-{(int(made[1]) - 1) // 3 * 3 + 1:02}-01T00:00:00Z"
    found = await checked(_git(git, "rev-list", "-1", "--first-parent", f"--before={begins}", commit), what)
    return found.text.strip()


async def _packed_past(cache: Cache, git: Path, repo: str, commit: str, what: str) -> Path:
    """The folder of packs with that commit and its ancestors, on top of those of an earlier one where there is one."""
    folder = cache.path("packs", repo.lower().replace("/", "__"), commit)

    async def make(into: Path) -> None:
        known: list[str] = []
        for kept in folder.parent.iterdir():
            ancestor = _git(git, "merge-base", "--is-ancestor", kept.name, commit)
            if len(kept.name) == len(commit) and len(list(kept.iterdir())) < _MOST_FILES:
                known += [kept.name] if (await run(ancestor)).code == 0 else []
        if known:
            latest = await checked(_git(git, "rev-list", "-1", "--no-walk=sorted", *known), what)
            known = [latest.text.strip()]
            link_files(folder.with_name(known[0]), into)
        await _pack(git, [commit], known, into, what)

    await cache.made(folder, make)
    return folder


async def _pack(git: Path, wanted: Sequence[str], known: Sequence[str], folder: Path, what: str) -> None:
    """Pack what ``wanted`` reaches and ``known`` does not."""
    # Deltas against what is known cannot be kept, and to look for others takes longer than all the rest.
    options = ("--delta-base-offset", "--threads=2", *(("--window=0", "--compression=1") if known else ()))
    revisions = "".join(f"{name}\n" for name in [*wanted, *(f"^{name}" for name in known)])
    await checked(
        [*_git(git, "pack-objects", "--quiet", "--revs", *options), str(folder / "pack")],
        what,
        given=revisions.encode(),
        timeout=_CLONE_TIME,
    )


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
