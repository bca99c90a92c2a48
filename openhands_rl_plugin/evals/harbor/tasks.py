"""Task folders in Harbor's format: ``instruction.md``, ``task.toml``, ``environment/``, ``tests/``, ``solution/``."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.harbor.recipe import ContainerRecipe, read_recipe
from openhands_rl_plugin.evals.harbor.test_script import TestNeeds, needs_of

_TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*?))?\}")
_TEST_SECONDS = 600.0


class HarborTask(Frozen):
    """One task. ``missing`` says, a line each, what it needs and this machine's sandbox does not have.

    ``variables`` and ``test_variables`` may hold ``${NAME}`` and ``${NAME:-default}`` of this process's environment,
    which are resolved when they are used, as far as the user allows. Times are in seconds.
    """

    folder: Path
    name: str
    instruction: str
    recipe: ContainerRecipe
    tests: TestNeeds
    workdir: str
    variables: dict[str, str] = Field(default_factory=dict)
    test_variables: dict[str, str] = Field(default_factory=dict)
    solution_variables: dict[str, str] = Field(default_factory=dict)
    test_timeout: float = _TEST_SECONDS
    missing: tuple[str, ...] = ()

    @property
    def solution(self) -> Path | None:
        """The oracle's script, where the task has one."""
        script = self.folder / "solution" / "solve.sh"
        return script if script.is_file() else None


def find_tasks(where: Path) -> tuple[Path, ...]:
    """The task folders at or below ``where``, by name. Raises ``ConfigError`` where there are none."""
    if not where.is_dir():
        raise ConfigError(f"{where} is no folder: give that of a task in Harbor's format, or one that holds some")
    found = tuple(sorted({file.parent for file in where.rglob("task.toml") if file.parent.parts[-1] != "solution"}))
    if not found:
        if next(where.rglob("task.yaml"), None) is not None:
            raise ConfigError(
                f"{where} holds tasks in the format of Terminal-Bench 1: convert them with Harbor's own "
                f"`harbor task migrate -i {where} -o FOLDER`"
            )
        raise ConfigError(f"there is no task.toml in {where} or below: it holds no tasks in Harbor's format")
    return found


def read_task(folder: Path) -> HarborTask:
    """The task in a folder. Raises ``ConfigError`` for one that Harbor would not run either."""
    config = _config(folder / "task.toml")
    instruction = folder / "instruction.md"
    script = folder / "tests" / "test.sh"
    for file in (instruction, script):
        if not file.is_file() and not config.get("steps"):
            raise ConfigError(f"{folder} has no {file.relative_to(folder)}")
    environment, verifier = _section(config, "environment"), _section(config, "verifier")
    recipe = read_recipe(folder / "environment" / "Dockerfile")
    needs = needs_of(script) if script.is_file() else TestNeeds()
    return HarborTask(
        folder=folder,
        name=str(_section(config, "task").get("name") or folder.name),
        instruction=instruction.read_text(encoding="utf-8").strip() if instruction.is_file() else "",
        recipe=recipe,
        tests=needs,
        workdir=str(environment.get("workdir") or recipe.workdir),
        variables=_texts(environment.get("env")),
        test_variables=_texts(verifier.get("env")),
        solution_variables=_texts(_section(config, "solution").get("env")),
        test_timeout=float(verifier.get("timeout_sec") or _TEST_SECONDS),
        missing=(*_missing(folder, config), *recipe.missing, *needs.missing),
    )


def find_task(where: Path, name: str) -> Path:
    """The task folder at or below ``where`` of a name or path. Raises ``BadEnvironmentError`` for none or several."""
    folders = {relative_name(where, folder): folder for folder in find_tasks(where)}
    named = [each for each in folders if each == name or str(folders[each]) == name]
    named = named or [each for each in folders if folders[each].name == name]
    if not named:
        raise BadEnvironmentError(f"{where} holds no task {name!r}")
    if len(named) > 1:
        raise BadEnvironmentError(f"{where} holds several tasks {name!r}: name one of {', '.join(named)}")
    return folders[named[0]]


def relative_name(where: Path, folder: Path) -> str:
    """What a row calls a task of ``where``: its path below, unlike its name the only one."""
    return folder.name if folder == where else folder.relative_to(where).as_posix()


def resolved(variables: Mapping[str, str], allowed: Collection[str] = ()) -> dict[str, str]:
    """``variables`` with their templates filled in from this process's environment, as far as ``allowed``.

    Raises ``BadEnvironmentError`` for a variable without a default that is not allowed or not set.
    """

    def fill(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2]) if found[1] in allowed else found[2]
        if value is None and found[1] in allowed:
            raise BadEnvironmentError(f"the task needs the environment variable {found[1]}: export {found[1]}=...")
        if value is None:
            raise BadEnvironmentError(
                f"the task wants your environment variable {found[1]}, which its commands would see: allow it with "
                f'pass_env = ["{found[1]}"] in [rl.environment] (tasks check: --pass-env {found[1]})'
            )
        return value

    return {name: _TEMPLATE.sub(fill, value) for name, value in variables.items()}


def _missing(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    environment, verifier, agent = (_section(config, name) for name in ("environment", "verifier", "agent"))
    if config.get("steps"):
        yield "several steps ([[steps]])"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"the system {environment['os']}"
    if (image := environment.get("docker_image")) and not (folder / "environment" / "Dockerfile").is_file():
        yield f"the image {image}"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).is_file():
            yield "several containers (docker-compose)"
    for key, what in (
        ("gpus", "a GPU"),
        ("tpu", "a TPU"),
        ("mcp_servers", "MCP servers"),
        ("healthcheck", "a healthcheck"),
    ):
        if environment.get(key):
            yield what
    if verifier.get("environment_mode") == "separate" or verifier.get("environment"):
        yield "a container of its own for the tests ([verifier] environment)"
    for section, values in (("agent", agent), ("verifier", verifier)):
        if values.get("user") not in (None, "root", 0):
            yield f"the user {values['user']} ([{section}])"
    if verifier.get("collect"):
        yield "commands after the episode ([[verifier.collect]])"


def _config(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _texts(values: object) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}
