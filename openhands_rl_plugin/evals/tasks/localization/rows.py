"""Rows of localization tasks: SWE-bench's columns, and the column ``localization``."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.patches import restored_files
from openhands_rl_plugin.evals.swe.types import Instance

LOCALIZATION = "localization"
"""The name of the column, and of the reward."""
DIRECTORY = "repository"

_INSTRUCTION = """\
{problem}

The repository is /workspace/{directory}. Find the places in it that have to be changed for that, and change nothing. \
Then finish with a message that names them, one a line, as path::Class.method, path::function, path::Class, or path \
alone for a place outside of these. Every place that need not be changed counts against you.
"""


class LocalizationSpec(Frozen):
    """The column ``localization``. ``git`` is the repository that has the row's ``base_commit``: a path or an address.
    ``taken_out`` counts the words of the commit's message that named a place of the fix, and are not in the statement.
    """

    git: str = Field(min_length=1)
    taken_out: int = 0


def is_localization(instance: Instance) -> bool:
    """Whether a row is a localization task."""
    return LOCALIZATION in instance.extra


def spec_of(instance: Instance) -> LocalizationSpec:
    """The column ``localization``. Raises ``ConfigError`` for one that is not as it should be."""
    try:
        return LocalizationSpec.model_validate(instance.extra[LOCALIZATION])
    except (KeyError, ValidationError) as error:
        raise ConfigError(f"{instance.instance_id}: its column {LOCALIZATION!r} is no localization task") from error


def instruction(instance: Instance) -> str:
    """The first message of the conversation."""
    # Not by str.format: a problem statement holds braces.
    asked = _INSTRUCTION.replace("{directory}", DIRECTORY)
    return asked.replace("{problem}", instance.problem_statement.strip())


def submission(patch: str, answer: str | None) -> str:
    """What is graded: the patch where it changes a file that was there, else the answer."""
    return patch if restored_files(patch) else answer or ""


def all_localization(instances: Iterable[Instance | None]) -> bool:
    """Whether all rows are localization tasks. Raises ``ConfigError`` where some are and some are not."""
    kinds = {each is not None and is_localization(each) for each in instances}
    if len(kinds) > 1:
        raise ConfigError(
            "localization tasks have another reward than tasks with tests: keep them in files of their own"
        )
    return kinds == {True}
