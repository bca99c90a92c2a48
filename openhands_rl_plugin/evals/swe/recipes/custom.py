"""Recipes from columns of the row. They need neither the ``swebench`` package nor its tables.

Their columns, beside those of SWE-bench:

- ``test_command``: the command that runs the tests and prints one line a test, as ``python -m pytest -rA`` does.
  Test files of the test patch are added at its end, unless ``test_files`` says which (an empty list: none).
- ``python``: a version as "3.12"; left out, the version of the Python that runs this.
- ``install``: commands, a list or one text, run in the repository with the network on; left out, none.
- ``packages``: requirements that the environment is made of, a list; left out, pytest alone. pip itself is in it
  only when it is named; ``pip install`` works all the same.
- ``log_parser``: ``pytest`` (also when left out), ``pytest_cut`` for tests that are named up to their first blank (also
  when left out and a name ends within its parameters), or another name of ``swe_bench.parser_of``.
- ``exclude_newer``: the date of which packages are installed, ``YYYY-MM-DD``.
- ``image``: for Docker.

The environment is shared by all rows with the same ``python``, ``packages`` and ``exclude_newer``.
"""

from __future__ import annotations

import shlex
import sys

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.patches import changed_files
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.scripts import environment_script, evaluation_script, install_script
from openhands_rl_plugin.evals.swe.types import Instance


def describes(instance: Instance) -> bool:
    """Whether the row has a test command of its own."""
    return "test_command" in instance.extra


def recipe(instance: Instance) -> Recipe:
    """The recipe in the row's columns. Raises ``ConfigError`` for a column of the wrong type."""
    extra = instance.extra
    python = _text(instance, "python") or f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = _lines(instance, "packages") if "packages" in extra else ["pytest"]
    test_patch = changed_files(instance.test_patch)
    tests = _lines(instance, "test_files") if "test_files" in extra else [each for each in test_patch if _is_test(each)]
    command = " ".join([_text(instance, "test_command"), *map(shlex.quote, tests)])
    return Recipe(
        environment_script=environment_script(python=python, pip_packages=map(shlex.quote, packages), bare=True),
        install_script=install_script(instance, _lines(instance, "install")),
        evaluation_script=evaluation_script(instance, command),
        python=python,
        parser=_text(instance, "log_parser") or ("pytest_cut" if _has_cut_names(instance) else "pytest"),
        exclude_newer=_text(instance, "exclude_newer"),
        image=_text(instance, "image") or None,
    )


def _has_cut_names(instance: Instance) -> bool:
    return any("[" in name and not name.endswith("]") for name in (*instance.fail_to_pass, *instance.pass_to_pass))


def _is_test(file: str) -> bool:
    return file.endswith(".py") and not file.endswith("conftest.py")


def _text(instance: Instance, column: str) -> str:
    value = instance.extra.get(column)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{instance.instance_id}: column {column} must be text")
    return value or ""


def _lines(instance: Instance, column: str) -> list[str]:
    value: JsonValue = instance.extra.get(column)
    if value is None:
        return []
    lines = value if isinstance(value, list) else str(value).splitlines()
    if not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"{instance.instance_id}: column {column} must be a list of texts")
    return [str(line) for line in lines if str(line).strip()]
