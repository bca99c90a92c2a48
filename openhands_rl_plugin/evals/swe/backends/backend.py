"""What all back ends have in common: the recipe of an instance, and the order of a grading."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.evals.swe.backends.repositories import RepositorySource, file_at, find_repository
from openhands_rl_plugin.evals.swe.grading import Box, Grading, Guard, evaluate, grade_and_log
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of
from openhands_rl_plugin.evals.swe.types import Instance, PatchVerdict


class BoxBackend:
    """Grades each patch in a box of its own, which ``box`` makes.

    ``sources``: where repositories come from, the first that has the commit; without any, the requirement files of a
    recipe come from GitHub. ``network`` is for the tests.
    """

    def __init__(self, sources: Sequence[RepositorySource], guard: Guard | None, *, network: bool) -> None:
        self._sources = tuple(sources)
        self._guard = guard
        self._network = network

    def box(self, instance: Instance, recipe: Recipe) -> AbstractAsyncContextManager[Box]:
        """A box with the instance's repository after its set-up; it is removed at the block's end."""
        raise NotImplementedError

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            recipe = await self.recipe(instance)
            written.write("eval.sh", recipe.evaluation_script)
            open_box = functools.partial(self.box, instance, recipe)
            return await evaluate(Grading(open_box, instance, recipe, patch, timeout), written, self._guard)

        return await grade_and_log(instance, patch, written, grade)

    async def close(self) -> None:
        """Nothing to release; caches and images stay."""

    async def recipe(self, instance: Instance) -> Recipe:
        """The instance's recipe. Raises as ``recipe_of`` does."""

        def read_file(repo: str, commit: str, path: str) -> str | None:
            if not self._sources:
                return from_github(repo, commit, path)
            return asyncio.run_coroutine_threadsafe(read(repo, commit, path), loop).result()

        async def read(repo: str, commit: str, path: str) -> str | None:
            wanted = instance.model_copy(update={"repo": repo, "base_commit": commit})
            return await file_at(await find_repository(wanted, self._sources), commit, path)

        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(recipe_of, instance, read_file)


@functools.lru_cache(maxsize=512)
def from_github(repo: str, commit: str, path: str) -> str | None:
    """A file of a public repository. Raises ``InfrastructureError``."""
    import httpx

    address = f"https://raw.githubusercontent.com/{repo}/{commit}/{path}"
    try:
        answer = httpx.get(address, timeout=60, follow_redirects=True)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status().text
    except httpx.HTTPError as error:
        raise InfrastructureError(f"{address}: {error}") from error
