"""What instances cannot be graded on this machine, found before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, RLError
from openhands_rl_plugin.evals.swe.backends.interpreters import find_python
from openhands_rl_plugin.evals.swe.recipes.parsers import parser_of
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of
from openhands_rl_plugin.evals.swe.recipes.swe_bench import swebench
from openhands_rl_plugin.evals.swe.types import Instance


def check_gradable(instances: Sequence[Instance], *, containers: bool) -> str | None:
    """A sentence about the instances that cannot be graded here; ``None`` when none is known.

    An instance needs a recipe, the package that the recipe is in, and without ``containers`` the recipe's Python.
    Raises ``ConfigError`` with the commonest reason when that is so of all of them.
    """
    reasons = {each.instance_id: reason for each in instances if (reason := _reason(each, containers=containers))}
    if not reasons:
        return None
    said = f"{len(reasons)} of {len(instances)} instances cannot be graded here{commonest(reasons.items())}"
    if len(reasons) == len(instances):
        raise ConfigError(said)
    return said


def commonest(reasons: Iterable[tuple[str, str]]) -> str:
    """`` (40 times: ...)`` or ``: ...``: the commonest of the reasons of (instance id, reason), or nothing."""
    counts = Counter(reason.removeprefix(f"{name}: ") for name, reason in reasons if reason)
    if not counts:
        return ""
    ((reason, times),) = counts.most_common(1)
    return f": {reason}" if len(counts) == 1 else f"; commonest reason ({times} times): {reason}"


def _reason(instance: Instance, *, containers: bool) -> str:
    try:
        recipe = recipe_of(instance, _no_file)
        parser_of(recipe.parser)
        if recipe.grader == "official":
            swebench("constants")
        if containers:
            return ""
        if not recipe.environment_script:
            return f"the row names an image, but not how to install {instance.repo}; use --backend docker"
        find_python(recipe.python)
    except InfrastructureError:
        return ""  # only files of the repository say what it needs
    except RLError as error:
        return str(error)
    return ""


def _no_file(repo: str, commit: str, path: str) -> str | None:
    raise InfrastructureError("the repository is not here yet")
