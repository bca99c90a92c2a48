"""The recipe of an instance. Its source depends on the row.

- A row with a ``test_command`` needs neither the ``swebench`` package nor its tables. Its columns (``Columns``):

  - ``test_command``: the command that runs the tests and prints one line a test, as ``python -m pytest -rA`` does.
    Test files of the test patch are added at its end, unless ``test_files`` names them (an empty list: none).
  - ``python``: a version as "3.12"; left out, the version of the Python that runs this.
  - ``install``: commands, a list or one text, run in the repository with the network on; left out, none.
  - ``packages``: requirements that the environment is made of, a list; left out, pytest alone. pip itself is in it
    only when it is named; ``pip install`` works all the same.
  - ``log_parser``: ``pytest`` (also when left out), or a parser of the ``swebench`` package, as ``parse_log_pytest``,
    which names tests up to their first blank.
  - ``exclude_newer``: the date of which packages are installed, ``YYYY-MM-DD``.
  - ``image``: for Docker.

  The environment is shared by all rows with the same ``python``, ``packages`` and ``exclude_newer``.
- A repository of SWE-Gym: ``swe_gym``.
- Any other: the tables in the ``swebench`` package, version 4.1.0, by ``swe_bench``; with ``eval_script``,
  ``log_parser`` and ``image`` (SWE-bench's tools, version 5) also without.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import ConfigError, problems
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.patches import changed_files
from openhands_rl_plugin.evals.swe.recipes import swe_bench, swe_gym
from openhands_rl_plugin.evals.swe.recipes.scripts import (
    END,
    START,
    ReadFile,
    Recipe,
    environment_script,
    evaluation_script,
    install_script,
)
from openhands_rl_plugin.evals.swe.types import Instance

_OF_VERSION_5 = {
    **{"image": "image", "log_parser": "parser", "eval_script": "evaluation_script", "eval_type": "eval_type"},
    "exclude_newer": "exclude_newer",
}


class Columns(Frozen):
    """The columns of a row with a test command of its own."""

    test_command: str
    test_files: tuple[str, ...] | None = None
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    install: str | tuple[str, ...] = ()
    packages: tuple[str, ...] = ("pytest",)
    log_parser: str = "pytest"
    exclude_newer: str = ""
    image: str | None = None


def recipe_of(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe of an instance. ``read_file`` reads the requirement files of its environment.

    Raises ``ConfigError`` for a row without a known recipe and for a column of the wrong type, ``MissingExtraError``
    without ``swebench`` where its tables are needed, and ``InfrastructureError``.
    """
    extra = {name: value for name, value in instance.extra.items() if value not in (None, "")}
    if "test_command" in extra:
        named = {name: extra[name] for name in Columns.model_fields if name in extra}
        return _own(instance, _checked(instance, Columns, named))
    script = str(extra.get("eval_script", f": '{START}' : '{END}'"))
    if not all(f": '{mark}'" in script for mark in (START, END)):
        raise ConfigError(f"{instance.instance_id}: its eval_script does not mark the output of its tests: {START}")
    changes = {field: extra[column] for column, field in _OF_VERSION_5.items() if column in extra}
    try:
        source = swe_gym if instance.repo.lower() in swe_gym.REPOSITORIES else swe_bench
        recipe = source.recipe(instance, read_file)
    except ConfigError:
        if not {"image", "eval_script", "log_parser"} <= extra.keys():
            raise
        recipe = Recipe(environment_script="", install_script="", evaluation_script="", python="", parser="")
    return _checked(instance, Recipe, {**recipe.model_dump(), **changes})


def _own(instance: Instance, columns: Columns) -> Recipe:
    changed = [file for file in changed_files(instance.test_patch) if file.endswith(".py")]
    tests = [file for file in changed if not file.endswith("conftest.py")]
    command = [columns.test_command, *map(shlex.quote, tests if columns.test_files is None else columns.test_files)]
    install = columns.install.splitlines() if isinstance(columns.install, str) else columns.install
    return Recipe(
        environment_script=environment_script(
            python=columns.python, pip_packages=map(shlex.quote, columns.packages), bare=True
        ),
        install_script=install_script(instance, [line for line in install if line.strip()]),
        evaluation_script=evaluation_script(instance, " ".join(command)),
        python=columns.python,
        parser=columns.log_parser,
        exclude_newer=columns.exclude_newer,
        image=columns.image,
    )


def _checked[M: Frozen](instance: Instance, model: type[M], values: Mapping[str, object]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(f"column {'.'.join(at)} {what}" for at, what in problems(error, model))
        raise ConfigError(f"{instance.instance_id}: {wrong}") from error
