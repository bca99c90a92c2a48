"""Installation and test commands of SWE-Gym's repositories, by range of versions."""

from __future__ import annotations

from collections.abc import Mapping

from openhands_rl_plugin.core.types import Frozen


class GymSpec(Frozen):
    """One range of versions. ``python`` is ``None`` where an ``environment.yml`` names it."""

    python: str | None
    install: str
    test_command: str
    pre_install: tuple[str, ...] = ()
    environment_patches: tuple[str, ...] = ()
    before_tests: tuple[str, ...] = ()


def _apt(packages: str) -> str:
    return f"apt-get -y update && apt-get -y upgrade && apt-get install -y {packages}"


_MYPY_STUBS = "git submodule update --init mypy/typeshed || true"
_MYPY_INSTALL = "python -m pip install -r test-requirements.txt; python -m pip install -e .; "
_MYPY_TOOLS = "pip install pytest pytest-xdist; hash -r"


def _mypy(python: str, install: str, test_command: str, *more: str) -> GymSpec:
    return GymSpec(python=python, install=install, test_command=test_command, pre_install=(_MYPY_STUBS, *more))


_MYPY = {
    "0.800": _mypy(
        "3.9",
        f"{_MYPY_INSTALL}{_MYPY_TOOLS};",
        "pytest -n0 -rA -k",
        "sed -i '1i types-typing-extensions==3.7.3' test-requirements.txt",
    ),
    "0.940": _mypy("3.10", _MYPY_INSTALL + _MYPY_TOOLS, "pytest -n0 -rA -k"),
    "1.0": _mypy("3.11", f"{_MYPY_INSTALL}hash -r", "pytest -n0 -rA -k"),
    "1.7": _mypy("3.12", f"{_MYPY_INSTALL}hash -r", "pytest -rA -k"),
}

_MOTO = {"0": GymSpec(python="3.12", install="make init", test_command="pytest -n0 -rA")}

_CONAN_INSTALL = " ".join(
    f"python -m pip install -r conans/requirements{name}.txt;" for name in ("", "_server", "_dev")
).removesuffix(";")
_CONAN_CYTHON = "echo 'cython<3' > /tmp/constraint.txt; export PIP_CONSTRAINT=/tmp/constraint.txt; "


def _conan(install: str) -> GymSpec:
    return GymSpec(
        python="3.10",
        install=f"{install} ",
        test_command="pytest -n0 -rA",
        pre_install=(_apt("build-essential cmake"),),
        before_tests=("export PYTHONPATH=${PYTHONPATH:-}:$(pwd)",),
    )


_CONAN = {
    "1.33": _conan(_CONAN_CYTHON + _CONAN_INSTALL),
    "1.60": _conan(_CONAN_INSTALL),
    "2.0": _conan(_CONAN_CYTHON + _CONAN_INSTALL),
    "2.1": _conan(_CONAN_INSTALL),
}

_DASK = {
    "0": GymSpec(
        python=None,
        install="python -m pip install --no-deps -e .",
        test_command="pytest -n0 -rA  --color=no",
        # It would install the newest dask from its repository.
        environment_patches=("sed -i '/- pip:/,/^ *-/d' environment.yml",),
    )
}

_MONAI = {
    "0": GymSpec(
        python="3.8",
        install=(
            r"sed -i '/^git+https:\/\/github.com\/Project-MONAI\//d' requirements-dev.txt; "
            "python -m pip install types-pkg-resources==0.1.3 pytest; "
            "pip install -r requirements-dev.txt;python setup.py develop;"
        ),
        test_command="pytest -rA ",
    )
}

_DVC_INSTALL = (
    'python -m pip install --upgrade pip wheel GitPython; python -m pip install "cython<3.0.0" && '
    "python -m pip install --no-build-isolation pyyaml==5.4.1; "
    "python -m pip install git+https://github.com/iterative/mock-ssh-server.git || true; "
    "python -m pip install -r tests/requirements.txt || true; "
    "python -m pip install -r test-requirements.txt || true; "
    'python -m pip install -e ".[tests,dev,all_remotes,all,testing]";'
)
# pytest 8 breaks pytest-lazy-fixture.
_DVC_OLD = ' python -m pip install "numpy<=1.20"; python -m pip install "pytest<8";'


def _dvc(python: str, more: str = "") -> GymSpec:
    moto = r"[ -f setup.py ] && sed -E -i 's/moto==([0-9]+\.[0-9]+\.[0-9]+)\.dev[0-9]+/moto==\1/' setup.py"
    return GymSpec(
        python=python, install=_DVC_INSTALL + more, test_command="pytest -rA", pre_install=(_apt("cmake"), moto)
    )


_DVC = {"0": _dvc("3.8", _DVC_OLD), "1.0": _dvc("3.9", _DVC_OLD), "3.4": _dvc("3.10")}

_BOKEH_SCRIPT = "cd bokehjs && npm install --location=global npm && npm ci && cd ../"
_BOKEH = {
    "0": GymSpec(
        python="3.8",
        install=(
            'pip install "setuptools<66" "jinja2<3.1"; printf "1\\n" | python setup.py develop; bokeh sampledata;'
        ),
        test_command="pytest -rA -n0",
        pre_install=(_BOKEH_SCRIPT,),
        environment_patches=(": \"${CONDA_MKL_INTERFACE_LAYER_BACKUP:=''}\"",),
    ),
    "3.0": GymSpec(
        python="3.10",
        install="python -m pip install -e .; python -m pip install bokeh_sampledata;",
        test_command="pytest -rA -n0",
        pre_install=(_BOKEH_SCRIPT,),
    ),
}


def _modin(python: str, more: str = "") -> GymSpec:
    return GymSpec(
        python=python,
        install=f"python -m pip install -e .;{more}",
        test_command="pytest -n0 -rA",
        pre_install=(_apt("libpq-dev"),),
    )


_MODIN = {"0": _modin("3.8", " python -m pip install numpy==1.23.1 protobuf==3.20.1;"), "0.20": _modin("3.9")}


def _pydantic(python: str, pdm: str) -> GymSpec:
    path = 'export PATH="$HOME/.local/bin:$PATH"'
    return GymSpec(
        python=python,
        install=f"{path}; pdm add pre-commit; make install;",
        test_command="pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
        pre_install=(
            "apt-get update && apt-get install -y locales",
            "apt-get install -y pipx",
            "pipx ensurepath",
            pdm,
            path,
            "which python",
            "python --version",
        ),
    )


_PYDANTIC = {"0": _pydantic("3.7", "pipx install pdm  --python python3.7"), "2.0": _pydantic("3.8", "pipx install pdm")}

_PANDAS_INSTALL = (
    "python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true; pip uninstall pytest-qt -y;"
)


def _pandas(install: str) -> GymSpec:
    return GymSpec(
        python=None,
        install=install,
        test_command="pytest -rA --tb=long",
        pre_install=("git remote add upstream https://github.com/pandas-dev/pandas.git", "git fetch upstream --tags"),
    )


_PANDAS = {"0": _pandas(f"python -m pip install 'numpy<2'; {_PANDAS_INSTALL}"), "2.2": _pandas(_PANDAS_INSTALL)}

_HYDRA_INSTALL = "pip install -r requirements/dev.txt; pip install -e .;"
_HYDRA_PIP = (
    "sed -i 's|isort@git+git://github.com/timothycrosley/isort|isort@git+https://github.com/timothycrosley/isort|g'"
    " requirements/dev.txt; "
    '{ tail -n1 requirements/requirements.txt | grep -q "." && echo ""; } >> requirements/requirements.txt; '
    'echo "pip==24.0" >> requirements/requirements.txt;pip install "pip==24.0"; '
)


def _hydra(install: str) -> GymSpec:
    return GymSpec(
        python="3.8",
        install=install,
        test_command="pytest -rA --tb=long",
        pre_install=(_apt("openjdk-17-jdk openjdk-17-jre"),),
    )


_HYDRA = {"0": _hydra(_HYDRA_PIP + _HYDRA_INSTALL), "1.3": _hydra(_HYDRA_INSTALL)}

REPOSITORIES: Mapping[str, Mapping[str, GymSpec]] = {
    "python/mypy": _MYPY,
    "getmoto/moto": _MOTO,
    "conan-io/conan": _CONAN,
    "dask/dask": _DASK,
    "project-monai/monai": _MONAI,
    "iterative/dvc": _DVC,
    "bokeh/bokeh": _BOKEH,
    "modin-project/modin": _MODIN,
    "pydantic/pydantic": _PYDANTIC,
    "pandas-dev/pandas": _PANDAS,
    "facebookresearch/hydra": _HYDRA,
}
"""Repository, in lower case -> first version of a range -> its commands."""

ENVIRONMENT_FILES: Mapping[str, tuple[str, ...]] = {
    "bokeh/bokeh": ("conda/environment-test-3.10.yml", "environment.yml"),
    "modin-project/modin": ("environment-dev.yml",),
    "dask/dask": (
        "continuous_integration/environment-3.10.yaml",
        "continuous_integration/environment-3.9.yaml",
        "continuous_integration/environment-3.8.yaml",
        "continuous_integration/travis/travis-37.yaml",
    ),
    "pandas-dev/pandas": ("environment.yml",),
}
"""Where the environment is described, the first that is there."""
