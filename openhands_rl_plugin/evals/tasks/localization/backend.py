"""Sets up and grades localization tasks. It needs git and bubblewrap, no environment, no tests and no network.

An agent gets the files of the commit before the fix, without the history, which would show the fix.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.records import LocatedPlaces, Places
from openhands_rl_plugin.environments.workspace.copies import scratch_folder
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.evals.swe.backends.interpreters import with_own_interpreter
from openhands_rl_plugin.evals.swe.grading import grade_and_log
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.patches import MAX_PATCH, refusal, sides, touched_files
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.tasks.localization.places import Located, places_of_answer, places_of_change
from openhands_rl_plugin.evals.tasks.localization.rows import DIRECTORY, spec_of
from openhands_rl_plugin.evals.tasks.sources.download import open_git
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.one_commit import apply_patch, make_repository
from openhands_rl_plugin.evals.tasks.sources.packages import Package
from openhands_rl_plugin.evals.tasks.sources.trees import LINK, PLAIN, SourceTree, TreeFile

FOLDERS = (f"/workspace/{DIRECTORY}", f"workspace/{DIRECTORY}", "/workspace")
"""Where the repository stood for the agent."""


class LocalizationBackend:
    """An ``InstanceBackend`` for localization tasks. ``cache`` keeps the clones of repositories that lie elsewhere."""

    name = "local"

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._opening = asyncio.Lock()

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        await asyncio.to_thread(check_bubblewrap)

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """The files before the fix, and this interpreter. Raises ``InfrastructureError``, ``ConfigError``."""
        repository = await self._repository(instance)
        tree = await asyncio.to_thread(repository.tree, instance.base_commit)
        await asyncio.to_thread(make_repository, tree, directory)
        return with_own_interpreter(directory)

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """What is found of the fix; resolved is what names its places and no others. ``patch`` may also be an answer.
        Never raises for what it holds; ``timeout`` bounds nothing, because nothing is run.
        """
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            repository = await self._repository(instance)
            return await asyncio.to_thread(graded, repository, instance, patch)

        return await grade_and_log(instance, patch, written, grade, checked=False)

    async def close(self) -> None:
        """Does nothing."""

    async def _repository(self, instance: Instance) -> GitRepository:
        package = Package(name="repository", git=spec_of(instance).git)
        async with self._opening:
            repository = await asyncio.to_thread(open_git, package, self._cache)
        try:
            await asyncio.to_thread(repository.git, "cat-file", "-e", f"{instance.base_commit}^{{commit}}")
        except ConfigError as error:
            why = (
                f"{instance.instance_id}: {package.git} has no commit {instance.base_commit[:12]}, or is no repository"
            )
            raise InfrastructureError(why) from error
        return repository


def graded(repository: GitRepository, instance: Instance, text: str) -> PatchVerdict:
    """The verdict on a patch or an answer. Raises ``InfrastructureError``, ``ConfigError``."""
    verdict = PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.UNRESOLVED)
    fix = places_of_patch(repository, instance.base_commit, instance.patch)
    if isinstance(fix, str) or not fix.places.files:
        raise ConfigError(f"{instance.instance_id}: its own patch does not apply, or changes nothing: {fix}")
    by = "patch" if is_patch(text) else "answer" if text.strip() else "nothing"
    found: Located | str = Located(Places())
    if by == "patch":
        found = places_of_patch(repository, instance.base_commit, text)
    elif by == "answer":
        read = functools.partial(file_at, repository, instance.base_commit)
        found = places_of_answer(text, files_at(repository, instance.base_commit), read, FOLDERS)
    why = found if isinstance(found, str) else "" if found.places.files else "it names no place"
    named = Located(Places()) if isinstance(found, str) else found
    right = named.places == fix.places
    whole = tuple(sorted({*fix.whole_files, *named.whole_files}))
    return verdict.model_copy(
        update={
            "kind": VerdictKind.RESOLVED
            if right
            else VerdictKind.UNAPPLIED
            if isinstance(found, str)
            else verdict.kind,
            "reason": why or ("" if right else "it names other places"),
            "places": LocatedPlaces(fix=fix.places, named=named.places, by=by, whole_files=whole),
        }
    )


def is_patch(text: str) -> bool:
    """Whether a submission is a patch; else it is an answer."""
    return text.startswith("diff --git ") or bool(sides(text))


def places_of_patch(repository: GitRepository, commit: str, patch: str) -> Located | str:
    """The places that a patch changes in the files of a commit, or why it cannot be applied to them.

    Raises ``InfrastructureError``.
    """
    if (why := refusal(patch)) is not None:
        return why
    data = {path: data for path in touched_files(patch) if (data := _data_at(repository, commit, path)) is not None}
    tree = SourceTree({path: TreeFile(PLAIN, each) for path, each in data.items()})
    with scratch_folder("openhands-rl-places-") as folder:
        if why := apply_patch(tree, patch, folder):
            return why
        after = _texts(folder / "repository")
    pairs = sides(patch)
    new = {each.new for each in pairs if each.new and not each.old}
    moved = {each.old: each.new for each in pairs if each.old and each.new}
    before = {**dict.fromkeys(new - data.keys()), **{path: _text(each) for path, each in data.items()}}
    return places_of_change(before, {path: after.get(moved.get(path) or path) for path in before})


def files_at(repository: GitRepository, commit: str) -> frozenset[str]:
    """The files of a commit, links and submodules left out."""
    listed = repository.text("ls-tree", "-r", "-z", commit).split("\0")
    entries = (line.partition("\t") for line in listed if line)
    return frozenset(
        path for meta, _, path in entries if meta.split()[:2] not in ([LINK, "blob"], ["160000", "commit"])
    )


def file_at(repository: GitRepository, commit: str, path: str) -> str | None:
    """The text of a file of a commit; ``None`` without one."""
    data = _data_at(repository, commit, path)
    return None if data is None else _text(data)


def _data_at(repository: GitRepository, commit: str, path: str) -> bytes | None:
    try:
        return repository.git("cat-file", "blob", f"{commit}:{path}")
    except (ConfigError, ValueError):
        return None


def _text(data: bytes) -> str:
    # What is no UTF-8 is compared all the same; Python reads few such files.
    return data.decode("utf-8", "replace")


def _texts(folder: Path) -> dict[str, str | None]:
    """The regular files after a patch; no link that it may have made is followed."""
    space = Workspace(folder)
    return {path: _text(space.read(path, MAX_PATCH)) for path in space.files(".")}
