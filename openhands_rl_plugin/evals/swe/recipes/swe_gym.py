"""Recipes of SWE-Gym's repositories, which no released ``swebench`` knows: Pythons, installation and test commands.

Commands of ``apt`` are left out: the images have what they install, and sandboxes see the host's programs.

SWE-Gym writes names of repositories in any case. Its versions are ranges here, each with its first version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, timedelta
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.swe.patches import changed_files
from openhands_rl_plugin.evals.swe.recipes.scripts import (
    ENVIRONMENT,
    ReadFile,
    Recipe,
    environment_script,
    evaluation_script,
    install_script,
)
from openhands_rl_plugin.evals.swe.types import Instance

EXCLUDE_NEWER = "2024-11-01"
"""When SWE-Gym's images were made."""

_SETTLING = timedelta(days=30)
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_CASE = re.compile(r"\[case ([^\]]+)\]")
_PYTHON = re.compile(r"^\s*-\s*python\s*[=><~]+\s*(\d+\.\d+)", re.MULTILINE)


class GymSpec(NamedTuple):
    """One range of versions. ``python`` is ``None`` where an ``environment.yml`` names it."""

    python: str | None
    install: str
    test_command: str = "pytest -n0 -rA"
    pre_install: tuple[str, ...] = ()
    before_tests: tuple[str, ...] = ()


def recipe(instance: Instance, read_file: ReadFile) -> Recipe:
    """The recipe of the newest version which is not newer than the instance's.

    Raises ``ConfigError`` for an unknown version, and ``InfrastructureError``.
    """
    repo, name = instance.repo.lower(), instance.instance_id
    try:
        wanted, found = (
            _version(instance.version),
            {_version(since): spec for since, spec in REPOSITORIES[repo].items()},
        )
        spec = found[max(since for since in found if since <= wanted)]
    except ValueError as error:
        raise ConfigError(f"{name}: no recipe for {instance.repo!r} in version {instance.version!r}") from error
    described = _environment_yml(instance, read_file) if repo in ENVIRONMENT_FILES else None
    python = spec.python or (match[1] if (match := _PYTHON.search(described or "")) else "3.10")
    files = [file for file in changed_files(instance.test_patch) if not file.endswith(_NO_TESTS)]
    # mypy's tests are cases in data files.
    cases = f'"{" or ".join(_CASE.findall(instance.test_patch))}"'
    tests = " ".join([spec.test_command, *([cases] if repo == "python/mypy" else files)])
    return Recipe(
        environment_script=environment_script(python=spec.python, environment_yml=described),
        install_script=install_script(instance, [*spec.pre_install, spec.install]),
        evaluation_script=evaluation_script(instance, tests, install=spec.install, before=spec.before_tests),
        python=python,
        parser="parse_log_pytest_v2" if repo == "pydantic/pydantic" else "parse_log_pytest",
        # An ``environment.yml`` names no versions, so that the packages of the instance's own time are taken.
        exclude_newer=_cut_off(instance) if described and instance.created_at else EXCLUDE_NEWER,
        image=f"xingyaoww/sweb.eval.x86_64.{name.lower().replace('__', '_s_')}:latest",
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _environment_yml(instance: Instance, read_file: ReadFile) -> str:
    commit = instance.environment_setup_commit or instance.base_commit
    for path in ENVIRONMENT_FILES[instance.repo.lower()]:
        if (text := read_file(instance.repo, commit, path)) is not None:
            # What dask's gives pip would install the newest dask from its repository.
            text = re.sub(r"^ *- pip:.*\n *-.*\n?", "", text, flags=re.M) if "dask" in instance.repo else text
            return re.sub(r"^name:.*$", f"name: {ENVIRONMENT}", text, flags=re.M)
    raise InfrastructureError(f"{instance.repo} has none of its environment files at {commit[:12]}")


def _cut_off(instance: Instance) -> str:
    return (date.fromisoformat(instance.created_at[:10]) + _SETTLING).isoformat()


_STUBS = ("git submodule update --init mypy/typeshed || true",)
_OLD_STUBS = (*_STUBS, "sed -i '1i types-typing-extensions==3.7.3' test-requirements.txt")
_MYPY = "python -m pip install -r test-requirements.txt; python -m pip install -e .; "
_MYPY_OLD = f"{_MYPY}pip install pytest pytest-xdist; hash -r"
_MYPY_TESTS = "pytest -n0 -rA -k"

_CYTHON = "echo 'cython<3' > /tmp/constraint.txt; export PIP_CONSTRAINT=/tmp/constraint.txt; "
_CONAN = "; ".join(f"python -m pip install -r conans/requirements{name}.txt" for name in ("", "_server", "_dev")) + " "
_CONAN_PATH = ("export PYTHONPATH=${PYTHONPATH:-}:$(pwd)",)

_MONAI = (
    r"sed -i '/^git+https:\/\/github.com\/Project-MONAI\//d' requirements-dev.txt; "
    "python -m pip install types-pkg-resources==0.1.3 pytest; "
    "pip install -r requirements-dev.txt;python setup.py develop;"
)

_DVC = (
    'python -m pip install --upgrade pip wheel GitPython; python -m pip install "cython<3.0.0" && '
    "python -m pip install --no-build-isolation pyyaml==5.4.1; "
    "python -m pip install git+https://github.com/iterative/mock-ssh-server.git || true; "
    "python -m pip install -r tests/requirements.txt || true; "
    "python -m pip install -r test-requirements.txt || true; "
    'python -m pip install -e ".[tests,dev,all_remotes,all,testing]";'
)
# pytest 8 breaks pytest-lazy-fixture.
_DVC_OLD = _DVC + ' python -m pip install "numpy<=1.20"; python -m pip install "pytest<8";'
_DVC_MOTO = (r"[ -f setup.py ] && sed -E -i 's/moto==([0-9]+\.[0-9]+\.[0-9]+)\.dev[0-9]+/moto==\1/' setup.py",)

_BOKEH = 'pip install "setuptools<66" "jinja2<3.1"; printf "1\\n" | python setup.py develop; bokeh sampledata;'
_BOKEH_SCRIPT = ("cd bokehjs && npm install --location=global npm && npm ci && cd ../",)

_PDM_PATH = 'export PATH="$HOME/.local/bin:$PATH"'
_PYDANTIC = f"{_PDM_PATH}; pdm add pre-commit; make install;"
_PYDANTIC_TESTS = "pytest -rA --tb=short -vv -o console_output_style=classic --no-header"

_PANDAS = "python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true; pip uninstall pytest-qt -y;"
_PANDAS_TAGS = ("git remote add upstream https://github.com/pandas-dev/pandas.git", "git fetch upstream --tags")

_HYDRA = "pip install -r requirements/dev.txt; pip install -e .;"
_HYDRA_PIP = (
    "sed -i 's|isort@git+git://github.com/timothycrosley/isort|isort@git+https://github.com/timothycrosley/isort|g'"
    " requirements/dev.txt; "
    '{ tail -n1 requirements/requirements.txt | grep -q "." && echo ""; } >> requirements/requirements.txt; '
    'echo "pip==24.0" >> requirements/requirements.txt;pip install "pip==24.0"; '
)

REPOSITORIES: Mapping[str, Mapping[str, GymSpec]] = {
    "python/mypy": {
        "0.800": GymSpec("3.9", f"{_MYPY_OLD};", _MYPY_TESTS, _OLD_STUBS),
        "0.940": GymSpec("3.10", _MYPY_OLD, _MYPY_TESTS, _STUBS),
        "1.0": GymSpec("3.11", f"{_MYPY}hash -r", _MYPY_TESTS, _STUBS),
        "1.7": GymSpec("3.12", f"{_MYPY}hash -r", "pytest -rA -k", _STUBS),
    },
    "getmoto/moto": {"0": GymSpec("3.12", "make init")},
    "conan-io/conan": {
        "1.33": GymSpec("3.10", _CYTHON + _CONAN, before_tests=_CONAN_PATH),
        "1.60": GymSpec("3.10", _CONAN, before_tests=_CONAN_PATH),
        "2.0": GymSpec("3.10", _CYTHON + _CONAN, before_tests=_CONAN_PATH),
        "2.1": GymSpec("3.10", _CONAN, before_tests=_CONAN_PATH),
    },
    "dask/dask": {"0": GymSpec(None, "python -m pip install --no-deps -e .", "pytest -n0 -rA  --color=no")},
    "project-monai/monai": {"0": GymSpec("3.8", _MONAI, "pytest -rA ")},
    "iterative/dvc": {
        "0": GymSpec("3.8", _DVC_OLD, "pytest -rA", _DVC_MOTO),
        "1.0": GymSpec("3.9", _DVC_OLD, "pytest -rA", _DVC_MOTO),
        "3.4": GymSpec("3.10", _DVC, "pytest -rA", _DVC_MOTO),
    },
    "bokeh/bokeh": {
        "0": GymSpec("3.8", _BOKEH, "pytest -rA -n0", _BOKEH_SCRIPT),
        "3.0": GymSpec(
            "3.10",
            "python -m pip install -e .; python -m pip install bokeh_sampledata;",
            "pytest -rA -n0",
            _BOKEH_SCRIPT,
        ),
    },
    "modin-project/modin": {
        "0": GymSpec("3.8", "python -m pip install -e .; python -m pip install numpy==1.23.1 protobuf==3.20.1;"),
        "0.20": GymSpec("3.9", "python -m pip install -e .;"),
    },
    "pydantic/pydantic": {
        "0": GymSpec("3.7", _PYDANTIC, _PYDANTIC_TESTS, ("pipx install pdm  --python python3.7", _PDM_PATH)),
        "2.0": GymSpec("3.8", _PYDANTIC, _PYDANTIC_TESTS, ("pipx install pdm", _PDM_PATH)),
    },
    "pandas-dev/pandas": {
        "0": GymSpec(None, f"python -m pip install 'numpy<2'; {_PANDAS}", "pytest -rA --tb=long", _PANDAS_TAGS),
        "2.2": GymSpec(None, _PANDAS, "pytest -rA --tb=long", _PANDAS_TAGS),
    },
    "facebookresearch/hydra": {
        "0": GymSpec("3.8", _HYDRA_PIP + _HYDRA, "pytest -rA --tb=long"),
        "1.3": GymSpec("3.8", _HYDRA, "pytest -rA --tb=long"),
    },
}
"""Repository, in lower case -> first version of a range -> its commands."""

ENVIRONMENT_FILES: Mapping[str, tuple[str, ...]] = {
    "bokeh/bokeh": ("conda/environment-test-3.10.yml", "environment.yml"),
    "modin-project/modin": ("environment-dev.yml",),
    "dask/dask": (
        *(f"continuous_integration/environment-3.{minor}.yaml" for minor in (10, 9, 8)),
        "continuous_integration/travis/travis-37.yaml",
    ),
    "pandas-dev/pandas": ("environment.yml",),
}
"""Where the environment is described, the first that is there."""
