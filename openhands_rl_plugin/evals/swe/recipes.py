"""The recipe of an instance: its scripts, its image, and the parser of its log. Its source depends on the row.

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
- A repository of SWE-Gym, which no released ``swebench`` knows: SWE-Gym's image and test command.
- Any other: the tables in the ``swebench`` package, version 4.1.0.

Scripts run what the official ones run, command by command. The package is imported when a row needs it: that takes
seconds.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, from_extra, problems
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.instances import Instance, row_of
from openhands_rl_plugin.evals.swe.patches import changed_files, restored_files

REPOSITORY = "/testbed"
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The version of the Python that runs this."""
EXCLUDE_NEWER = "2024-08-01"
"""When the official images were made. Old repositories break with packages of later dates."""

_ACTIVATE = ("source /opt/miniconda3/bin/activate", "conda activate testbed")
_PATCH_END = "EOF_114329324912"
_RAW = "https://raw.githubusercontent.com/"
_LOCK = threading.Lock()
ReadFile = Callable[[str, str, str], str | None]
"""``(repo, commit, path)`` -> the file's text, or ``None`` when there is no such file.

Raises ``InfrastructureError`` when the repository is out of reach.
"""


class Recipe(Frozen):
    """Scripts as the official tools run them, in ``/bin/bash``, with the repository at ``/testbed``. Without the first
    two there is nothing but an image to run in.

    ``exclude_newer``: the date of which packages are installed, ``YYYY-MM-DD``; empty for today's. ``python``: a
    version as "3.9"."""

    environment_script: str = ""
    install_script: str = ""
    evaluation_script: str = ""
    python: str = ""
    parser: str = ""
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    exclude_newer: str = ""
    image: str | None = None


class Columns(Frozen):
    """The columns of a row with a test command of its own."""

    test_command: str
    test_files: tuple[str, ...] | None = None
    python: str = PYTHON
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
        try:
            return _own(instance, Columns.model_validate(named))
        except ValidationError as error:
            wrong = "; ".join(f"column {'.'.join(at)} {what}" for at, what in problems(error, Columns))
            raise ConfigError(f"{instance.instance_id}: {wrong}") from error
    find = _swe_gym if instance.repo.lower() in _SWE_GYM else _swe_bench
    return find(instance, read_file)


def _own(instance: Instance, columns: Columns) -> Recipe:
    changed = [file for file in changed_files(instance.test_patch) if file.endswith(".py")]
    tests = [file for file in changed if not file.endswith("conftest.py")]
    command = [columns.test_command, *map(shlex.quote, tests if columns.test_files is None else columns.test_files)]
    install = columns.install.splitlines() if isinstance(columns.install, str) else columns.install
    packages = " ".join(map(shlex.quote, columns.packages))
    create = f"conda create -n testbed python={columns.python} -y --no-default-packages"
    return Recipe(
        environment_script=_script(
            "set -exo pipefail",
            [_ACTIVATE[0], create, _ACTIVATE[1], *([f"python -m pip install {packages}"] if packages else [])],
        ),
        install_script=_script(
            "set -exo pipefail",
            [
                f"git clone -o origin https://github.com/{instance.repo} {REPOSITORY}",
                f"chmod -R 777 {REPOSITORY}",
                f"cd {REPOSITORY}",
                f"git reset --hard {instance.base_commit}",
                "git remote remove origin",
                *_ACTIVATE,
                *(line for line in install if line.strip()),
                "git config --global user.email setup@swebench.config",
                "git config --global user.name SWE-bench",
                "git commit --allow-empty -am SWE-bench",
            ],
        ),
        evaluation_script=_evaluation_script(instance, " ".join(command)),
        python=columns.python,
        parser=columns.log_parser,
        exclude_newer=columns.exclude_newer,
        image=columns.image,
    )


def _evaluation_script(instance: Instance, test_command: str) -> str:
    """Restore the test files, apply the row's test patch and run the tests, between the two markers."""
    files = " ".join(map(shlex.quote, restored_files(instance.test_patch)))
    restore = f"git checkout {instance.base_commit} {files}"
    lines = [
        *_ACTIVATE,
        f"cd {REPOSITORY}",
        f"git config --global --add safe.directory {REPOSITORY}",
        f"cd {REPOSITORY}",
        "git status",
        "git show",
        f"git -c core.fileMode=false diff {instance.base_commit}",
        *_ACTIVATE,
        restore,
        f"git apply -v - <<'{_PATCH_END}'\n{instance.test_patch}\n{_PATCH_END}",
        f": '{START}'",
        test_command,
        f": '{END}'",
        restore,
    ]
    return _script("set -xo pipefail", lines)


def _script(options: str, lines: Iterable[str]) -> str:
    return "\n".join(["#!/bin/bash", options, *lines]) + "\n"


_SWE_GYM = {
    **dict.fromkeys(("getmoto/moto", "modin-project/modin", "bokeh/bokeh"), "pytest -n0 -rA"),
    **dict.fromkeys(("project-monai/monai", "iterative/dvc"), "pytest -rA"),
    **dict.fromkeys(("pandas-dev/pandas", "facebookresearch/hydra"), "pytest -rA --tb=long"),
    "dask/dask": "pytest -n0 -rA --color=no",
    "conan-io/conan": "PYTHONPATH=${PYTHONPATH:-}:$(pwd) pytest -n0 -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA -k",
}
"""SWE-Gym's repositories, which it writes in any case, and their test commands: the images have all else."""
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_CASE = re.compile(r"\[case ([^\]]+)\]")


def _swe_gym(instance: Instance, read_file: ReadFile) -> Recipe:
    """An image with the project installed in place, so that no set-up runs before the tests."""
    repo = instance.repo.lower()
    files = [file for file in changed_files(instance.test_patch) if not file.endswith(_NO_TESTS)]
    # mypy's tests are cases in data files.
    cases = f'"{" or ".join(_CASE.findall(instance.test_patch))}"'
    tests = [cases] if repo == "python/mypy" else files
    return Recipe(
        evaluation_script=_evaluation_script(instance, " ".join([_SWE_GYM[repo], *tests])),
        parser="parse_log_pytest_v2" if repo == "pydantic/pydantic" else "parse_log_pytest",
        image=f"xingyaoww/sweb.eval.x86_64.{instance.instance_id.lower().replace('__', '_s_')}:latest",
    )


def swebench(module: str) -> Any:
    """A module of the package. Raises ``MissingExtraError``."""
    with from_extra("swe", "swebench==4.1.0"):
        return import_module(f"swebench.harness.{module}")


def _swe_bench(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe in the package's tables. Raises ``ConfigError`` for a repository or version that is not there."""
    constants = swebench("constants")
    specs = constants.MAP_REPO_VERSION_TO_SPECS.get(instance.repo, {}).get(instance.version)
    if specs is None:
        what = f"{instance.repo!r} in version {instance.version!r}"
        raise ConfigError(f"{instance.instance_id}: no recipe for {what}; give the row a test_command of its own")
    with _files_from(read_file):
        spec = swebench("test_spec.test_spec").make_test_spec(row_of(instance), namespace="swebench")
    # Of other languages, and where conda's packages are needed, there are images only.
    local = "python" in specs and specs.get("packages") != "environment.yml"
    return Recipe(
        environment_script=spec.setup_env_script if local else "",
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
