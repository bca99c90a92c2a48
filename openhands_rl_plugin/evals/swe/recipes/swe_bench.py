"""Recipes from the ``swebench`` package, version 4.1.0: its tables, its scripts, its parsers of logs; and own parsers.

The package is imported when a row needs it: that takes seconds.
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, MissingExtraError
from openhands_rl_plugin.evals.swe.dataset import row_of
from openhands_rl_plugin.evals.swe.recipes.scripts import ReadFile, Recipe
from openhands_rl_plugin.evals.swe.types import Instance

EXCLUDE_NEWER = "2024-08-01"
"""When the official images were made. Old repositories break with packages of later dates."""

EXTRA = "swe"

_RAW = "https://raw.githubusercontent.com/"
_LOCK = threading.Lock()


def swebench(module: str) -> Any:
    """A module of the package. Raises ``MissingExtraError``; ``ConfigError`` for a version without the tables."""
    try:
        return import_module(f"swebench.harness.{module}")
    except ModuleNotFoundError as error:
        if error.name in ("swebench", "swebench.harness"):
            raise MissingExtraError("swebench", EXTRA) from error
        if not (error.name or "").startswith("swebench"):
            raise MissingExtraError(error.name or "swebench", EXTRA) from error
        raise ConfigError(f"this swebench has no {module}; install swebench==4.1.0") from error


def knows(instance: Instance) -> bool:
    """Whether the repository and its version are in the package's tables."""
    return instance.version in swebench("constants").MAP_REPO_VERSION_TO_SPECS.get(instance.repo, {})


def recipe(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe in the package's tables. Raises ``ConfigError`` for a repository or version that is not there."""
    constants = swebench("constants")
    specs = constants.MAP_REPO_VERSION_TO_SPECS.get(instance.repo)
    if specs is None:
        raise ConfigError(
            f"{instance.instance_id}: no recipe for {instance.repo!r}; give the row a test_command of its own"
        )
    if instance.version not in specs:
        raise ConfigError(f"{instance.instance_id}: no version {instance.version!r} of {instance.repo} is known")
    python = specs[instance.version].get("python")
    if python is None:
        raise ConfigError(f"{instance.instance_id}: {instance.repo} is not a Python repository; use --backend docker")
    with _files_from(read_file):
        spec = swebench("test_spec.test_spec").make_test_spec(row_of(instance), namespace="swebench")
    return Recipe(
        environment_script=spec.setup_env_script,
        install_script=spec.install_repo_script,
        evaluation_script=spec.eval_script,
        python=str(python),
        parser=swebench("log_parsers").MAP_REPO_TO_PARSER[instance.repo].__name__,
        eval_type="fail_only" if instance.repo in constants.FAIL_ONLY_REPOS else "pass_and_fail",
        exclude_newer=EXCLUDE_NEWER,
        image=spec.instance_image_key,
    )


@contextmanager
def _files_from(read_file: ReadFile) -> Iterator[None]:
    """Inside, the package reads requirement files by ``read_file`` where it would ask GitHub."""

    def get(url: str, headers: object = None) -> SimpleNamespace:
        repo, commit, path = _parts(url)
        text = read_file(repo, commit, path)
        return SimpleNamespace(status_code=404 if text is None else 200, text=text or "")

    module = swebench("test_spec.python")
    with _LOCK:
        original, module.requests = module.requests, SimpleNamespace(get=get)
        try:
            yield
        except ValueError as error:
            raise InfrastructureError(str(error)) from error
        finally:
            module.requests = original


def _parts(url: str) -> tuple[str, str, str]:
    """``https://raw.githubusercontent.com/OWNER/NAME/COMMIT/PATH``; the path may hold ``..``."""
    owner, name, commit, path = url.removeprefix(_RAW).split("/", 3)
    return f"{owner}/{name}", commit, posixpath.normpath(path)


Statuses = dict[str, str]
"""Test -> PASSED, FAILED, ERROR, SKIPPED or XFAIL."""
Parser = Callable[[str], Statuses]

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")

_COLOUR = re.compile(r"\[(\d+)m")
_CONTROL = str.maketrans("", "", "".join(map(chr, range(1, 32))))
_PROGRESS = re.compile(r"FAILED\s*\[.*?\]")


# A parameter may hold blanks, dashes and brackets.
_RESULT = re.compile(rf"({'|'.join(STATUSES)}) +([^\[\s][^\[]*?(?:\[.*?\])?)(?: - .*)?")


def parse_pytest(log: str) -> Statuses:
    """The summary of ``pytest -rA``: the status, then the test as pytest names it, blanks included."""
    lines = map(_RESULT.fullmatch, map(str.rstrip, log.split("\n")))
    return {line[2]: line[1] for line in lines if line is not None}


def parse_pytest_cut(log: str) -> Statuses:
    """As SWE-bench and SWE-Gym name tests: up to the first blank."""
    return dict(found for line in log.split("\n") if (found := _summary_line(line)) is not None)


def parse_pytest_pydantic(log: str) -> Statuses:
    """pydantic's runs: colours in the summary, a percentage after FAILED, and lines that end with the status."""
    found: Statuses = {}
    for raw in log.split("\n"):
        line = _PROGRESS.sub("FAILED", _COLOUR.sub("", raw).translate(_CONTROL))
        if (summary := _summary_line(line)) is not None:
            found[summary[0]] = summary[1]
        elif not line.startswith(STATUSES) and line.endswith(STATUSES) and len(words := line.split()) > 1:
            found[words[0]] = words[1]
    return found


def _summary_line(line: str) -> tuple[str, str] | None:
    """The test and its status; ``None`` for a line that does not begin with a status and a test."""
    if not line.startswith(STATUSES):
        return None
    words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
    return (words[1], words[0]) if len(words) > 1 else None


_OWN: Mapping[str, Parser] = {
    "pytest": parse_pytest,
    "pytest_cut": parse_pytest_cut,
    "pytest_pydantic": parse_pytest_pydantic,
}


def parser_of(name: str) -> Parser:
    """The parser of a recipe. Raises ``ConfigError`` for an unknown one, ``MissingExtraError`` without ``swebench``."""
    if name in _OWN:
        return _OWN[name]
    official = getattr(swebench("log_parsers.python"), name, None) if name.startswith("parse_log_") else None
    if official is None:
        raise ConfigError(f"unknown log_parser {name!r}; own ones: {', '.join(_OWN)}, and those of swebench 4.1.0")
    return lambda log: official(log, None)
