"""Recipes from the ``swebench`` package, version 4.1.0: its tables, scripts and parsers of logs; and the own parser.

The package is imported when a row needs it: that takes seconds.
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, from_extra
from openhands_rl_plugin.evals.swe.dataset import row_of
from openhands_rl_plugin.evals.swe.recipes.scripts import ReadFile, Recipe
from openhands_rl_plugin.evals.swe.types import Instance

EXCLUDE_NEWER = "2024-08-01"
"""When the official images were made. Old repositories break with packages of later dates."""

_RAW = "https://raw.githubusercontent.com/"
_LOCK = threading.Lock()


def swebench(module: str) -> Any:
    """A module of the package. Raises ``MissingExtraError``."""
    with from_extra("swe", "swebench==4.1.0"):
        return import_module(f"swebench.harness.{module}")


def recipe(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe in the package's tables. Raises ``ConfigError`` for a repository or version that is not there."""
    constants = swebench("constants")
    specs = constants.MAP_REPO_VERSION_TO_SPECS.get(instance.repo, {}).get(instance.version)
    if specs is None:
        what = f"{instance.repo!r} in version {instance.version!r}"
        raise ConfigError(f"{instance.instance_id}: no recipe for {what}; give the row a test_command of its own")
    with _files_from(read_file):
        spec = swebench("test_spec.test_spec").make_test_spec(row_of(instance), namespace="swebench")
    return Recipe(
        # Of other languages there are images only.
        environment_script=spec.setup_env_script if "python" in specs else "",
        install_script=spec.install_repo_script,
        evaluation_script=spec.eval_script,
        python=str(specs.get("python", "")),
        parser=swebench("log_parsers").MAP_REPO_TO_PARSER[instance.repo].__name__,
        eval_type="fail_only" if instance.repo in constants.FAIL_ONLY_REPOS else "pass_and_fail",
        exclude_newer=EXCLUDE_NEWER,
        image=spec.instance_image_key,
    )


@contextmanager
def _files_from(read_file: ReadFile) -> Iterator[None]:
    """Inside, the package reads requirement files by ``read_file`` where it would ask GitHub."""

    def get(url: str, headers: object = None) -> SimpleNamespace:
        # ``https://raw.githubusercontent.com/OWNER/NAME/COMMIT/PATH``, and the path may hold ``..``.
        owner, name, commit, path = url.removeprefix(_RAW).split("/", 3)
        text = read_file(f"{owner}/{name}", commit, posixpath.normpath(path))
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


Statuses = dict[str, str]
"""Test -> PASSED, FAILED, ERROR, SKIPPED or XFAIL."""
Parser = Callable[[str], Statuses]

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
# A parameter may hold blanks, dashes and brackets.
_RESULT = re.compile(rf"({'|'.join(STATUSES)}) +([^\[\s][^\[]*?(?:\[.*?\])?)(?: - .*)?")


def parse_pytest(log: str) -> Statuses:
    """The summary of ``pytest -rA``: the status, then the test as pytest names it, blanks included."""
    lines = map(_RESULT.fullmatch, map(str.rstrip, log.split("\n")))
    return {line[2]: line[1] for line in lines if line is not None}


def parser_of(name: str) -> Parser:
    """The parser of a recipe. Raises ``ConfigError`` for an unknown one, ``MissingExtraError`` without ``swebench``."""
    if name == "pytest":
        return parse_pytest
    known = {each.__name__: each for each in swebench("log_parsers").MAP_REPO_TO_PARSER.values()}
    official = known.get(name) or getattr(swebench("log_parsers.python"), name, None)
    if official is None or not name.startswith("parse_log_"):
        raise ConfigError(f"unknown log_parser {name!r}: pytest, or a parse_log_... of swebench 4.1.0")
    return lambda log: official(log, None)
