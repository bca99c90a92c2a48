"""The repositories of ``swe-local`` tasks, rebuilt from their rows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.sources.download import fetch
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.packages import Package, Release

_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


class TaskRepositories:
    """A ``RepositorySource`` for rows with a ``source`` that was pinned by ``tasks make``.

    The row's patches are reverted in the package's files, which gives ``base_commit``.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._making = asyncio.Lock()

    async def find(self, instance: Instance) -> Path | None:
        """The repository; ``None`` for a row without such a source.

        Raises ``InfrastructureError`` without network, and ``ConfigError`` when the row was changed by hand.
        """
        source = instance.extra.get("source")
        if not isinstance(source, dict):
            return None
        if not _PLAIN.fullmatch(instance.instance_id):
            raise ConfigError(f"the id {instance.instance_id!r} cannot name a folder")
        place = self._cache / "task-repositories" / f"{instance.instance_id}-{instance.base_commit[:12]}.git"
        async with self._making:
            return await asyncio.to_thread(self._made, instance, source, place)

    def _made(self, instance: Instance, source: JsonObject, place: Path) -> Path:
        repository = GitRepository.create(place)
        try:
            repository.git("cat-file", "-e", f"{instance.base_commit}^{{commit}}")
            return place
        except ConfigError:
            pass
        package = _package(source)
        label = str(source.get("label") or package.label)
        _, tree = fetch(package, self._cache)
        solved = repository.commit(tree, label, "solved")
        taken_back = (instance.patch, instance.test_patch)
        base = repository.without(solved, taken_back, label, "main")
        repository.git("update-ref", "-d", "refs/heads/solved")
        if base != instance.base_commit:
            raise InfrastructureError(
                f"{instance.instance_id}: its source and patches give commit {base[:12]}, not"
                f" {instance.base_commit[:12]}; the row, or the source, has been changed"
            )
        return place


def _package(source: JsonObject) -> Package:
    """The package behind a row's source. Raises ``ConfigError`` for a source of another kind."""
    texts = {name: str(value) for name, value in source.items()}
    if {"sdist", "version", "sha256"} <= texts.keys():
        release = Release(version=texts["version"], sha256=texts["sha256"])
        return Package(name=texts["sdist"], release=release)
    if {"git", "commit"} <= texts.keys():
        return Package(name="repository", git=texts["git"], commit=texts["commit"])
    if {"archive", "path"} <= texts.keys():
        return Package(name=texts["archive"], archive=Path(texts["path"]))
    raise ConfigError(f"a source of an unknown kind: {', '.join(sorted(texts))}")
