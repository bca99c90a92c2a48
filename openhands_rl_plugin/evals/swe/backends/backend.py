"""What both back ends have in common: the order of a grading."""

from __future__ import annotations

import functools
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from openhands_rl_plugin.evals.swe.grading import Box, Grading, Guard, evaluate, grade_and_log
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.recipes.scripts import Recipe
from openhands_rl_plugin.evals.swe.types import Instance, PatchVerdict


class BoxBackend:
    """Grades each patch in a box of its own, which ``box`` makes. ``network`` is for the tests."""

    def __init__(self, guard: Guard | None, *, network: bool) -> None:
        self._guard = guard
        self._network = network

    def box(self, instance: Instance, recipe: Recipe) -> AbstractAsyncContextManager[Box]:
        """A box with the instance's repository after its set-up; it is removed at the block's end."""
        raise NotImplementedError

    async def recipe(self, instance: Instance) -> Recipe:
        """The instance's recipe. Raises as ``recipe_of`` does."""
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
