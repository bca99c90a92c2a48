"""How an instance's environment is made, how its repository is installed, how its tests run and how their log is
read: a ``Recipe``. Where that knowledge comes from depends on the row.

- Columns of its own (``test_command``): ``recipe_own``.
- ``eval_script``, ``log_parser`` and ``image`` (SWE-bench's tools, version 5): ``recipe_columns``.
- A repository of SWE-Gym: ``recipe_gym``.
- Any other: the tables in the ``swebench`` package, version 4.1.0, by ``recipe_swebench``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.swe.types import Instance
from openhands_rl_plugin.types import Frozen

ReadFile = Callable[[str, str, str], str | None]
"""``(repo, commit, path)`` -> the file's text, or ``None`` when there is no such file.

Raises ``InfrastructureError`` when the repository is out of reach.
"""


class Recipe(Frozen):
    """Scripts as the official tools run them, in ``/bin/bash``, with the repository at ``/testbed``. Without the first
    two there is nothing but an image to run in.

    ``exclude_newer``: the date of which packages are installed, ``YYYY-MM-DD``; empty for today's. ``python``: a
    version as "3.9". ``judge``: whose functions compare the outcomes of tests with the row.
    """

    environment_script: str
    install_script: str
    evaluation_script: str
    python: str
    parser: str
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    exclude_newer: str = ""
    image: str | None = None
    judge: Literal["official", "own"] = "official"
    variables: dict[str, str] = Field(default_factory=dict)


def recipe_of(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe of an instance. ``read_file`` is asked for requirement files that its environment is made from.

    Raises ``ConfigError`` for a row that nothing is known about, ``MissingExtraError`` without ``swebench`` where its
    tables are needed, and ``InfrastructureError``.
    """
    from openhands_rl_plugin.swe import recipe_gym, recipe_own, recipe_swebench

    if recipe_own.describes(instance):
        return recipe_own.recipe(instance)
    if recipe_gym.knows(instance.repo):
        recipe = recipe_gym.recipe(instance, read_file)
    elif recipe_swebench.is_complete(instance) and not recipe_swebench.knows(instance):
        recipe = recipe_swebench.IMAGE_ONLY
    else:
        recipe = recipe_swebench.recipe(instance, read_file)
    return recipe_swebench.with_columns(instance, recipe)
