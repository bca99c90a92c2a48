"""The recipe of an instance. Its source depends on the row.

- Columns of its own (``test_command``): ``custom``.
- ``eval_script``, ``log_parser`` and ``image`` (SWE-bench's tools, version 5): ``swe_bench.with_columns``.
- A repository of SWE-Gym: ``swe_gym``.
- Any other: the tables in the ``swebench`` package, version 4.1.0, by ``swe_bench``.
"""

from __future__ import annotations

from openhands_rl_plugin.evals.swe.recipes import custom, swe_bench, swe_gym
from openhands_rl_plugin.evals.swe.recipes.base import ReadFile, Recipe
from openhands_rl_plugin.evals.swe.types import Instance


def recipe_of(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe of an instance. ``read_file`` reads the requirement files of its environment.

    Raises ``ConfigError`` for a row without a known recipe, ``MissingExtraError`` without ``swebench`` where its
    tables are needed, and ``InfrastructureError``.
    """
    if custom.describes(instance):
        return custom.recipe(instance)
    if swe_gym.knows(instance.repo):
        recipe = swe_gym.recipe(instance, read_file)
    elif swe_bench.is_complete(instance) and not swe_bench.knows(instance):
        recipe = swe_bench.IMAGE_ONLY
    else:
        recipe = swe_bench.recipe(instance, read_file)
    return swe_bench.with_columns(instance, recipe)
