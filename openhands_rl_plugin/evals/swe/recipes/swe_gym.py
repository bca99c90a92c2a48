"""Recipes of SWE-Gym's repositories, which no released ``swebench`` knows: Pythons, installation and test commands.

SWE-Gym writes names of repositories in any case. Its versions are ranges here, each with its first version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, timedelta

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.swe.patches import changed_files
from openhands_rl_plugin.evals.swe.recipes.base import ReadFile, Recipe
from openhands_rl_plugin.evals.swe.recipes.scripts import (
    ENVIRONMENT,
    environment_script,
    evaluation_script,
    install_script,
)
from openhands_rl_plugin.evals.swe.recipes.swe_gym_tables import ENVIRONMENT_FILES, REPOSITORIES, GymSpec
from openhands_rl_plugin.evals.swe.types import Instance

EXCLUDE_NEWER = "2024-11-01"
"""When SWE-Gym's images were made."""

_SETTLING = timedelta(days=30)
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_CASE = re.compile(r"\[case ([^\]]+)\]")


def knows(repo: str) -> bool:
    """Whether the repository is one of SWE-Gym's."""
    return repo.lower() in REPOSITORIES


def recipe(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe of the instance's version. Raises ``ConfigError`` and ``InfrastructureError``."""
    repo = instance.repo.lower()
    spec = _spec(instance, REPOSITORIES[repo])
    described = _environment_yml(instance, read_file) if repo in ENVIRONMENT_FILES else None
    return Recipe(
        environment_script=environment_script(
            python=spec.python, environment_yml=described, patches=spec.environment_patches
        ),
        install_script=install_script(instance, [*spec.pre_install, spec.install], committed=False),
        evaluation_script=evaluation_script(
            instance, _test_command(instance, spec), marked=False, install=spec.install, before=spec.before_tests
        ),
        python=spec.python or _python_in(described or ""),
        parser="pytest_pydantic" if repo == "pydantic/pydantic" else "pytest_cut",
        exclude_newer=_cut_off(instance) if described else EXCLUDE_NEWER,
        image=f"xingyaoww/sweb.eval.x86_64.{instance.instance_id.lower().replace('__', '_s_')}:latest",
    )


def _spec(instance: Instance, specs: Mapping[str, GymSpec]) -> GymSpec:
    """That of the newest version which is not newer than the instance's."""
    try:
        wanted = _version(instance.version)
    except ValueError as error:
        raise ConfigError(f"{instance.instance_id}: the version {instance.version!r} is no number") from error
    reached = [since for since in specs if _version(since) <= wanted]
    if not reached:
        raise ConfigError(
            f"{instance.instance_id}: {instance.repo} {instance.version} is older than what can be installed"
        )
    return specs[max(reached, key=_version)]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _test_command(instance: Instance, spec: GymSpec) -> str:
    if instance.repo.lower() == "python/mypy":
        # mypy's tests are cases in data files.
        return f'{spec.test_command} "{" or ".join(_CASE.findall(instance.test_patch))}"'
    files = [file for file in changed_files(instance.test_patch) if not file.endswith(_NO_TESTS)]
    return " ".join([spec.test_command, *files])


def _environment_yml(instance: Instance, read_file: ReadFile) -> str:
    commit = instance.environment_setup_commit or instance.base_commit
    paths: Sequence[str] = ENVIRONMENT_FILES[instance.repo.lower()]
    for path in paths:
        if (text := read_file(instance.repo, commit, path)) is not None:
            return re.sub(r"^name:.*$", f"name: {ENVIRONMENT}", text, flags=re.MULTILINE)
    raise InfrastructureError(f"{instance.repo} has none of {', '.join(paths)} at {commit[:12]}")


def _python_in(environment_yml: str) -> str:
    """The version in a line such as ``- python=3.10``; for ``>=3.8`` the lowest."""
    match = re.search(r"^\s*-\s*python\s*[=><~]+\s*(\d+\.\d+)", environment_yml, re.MULTILINE)
    return match[1] if match else "3.10"


def _cut_off(instance: Instance) -> str:
    """An ``environment.yml`` names no versions, so that the packages of the instance's own time are taken."""
    try:
        return (date.fromisoformat(instance.created_at[:10]) + _SETTLING).isoformat()
    except ValueError:
        return EXCLUDE_NEWER
