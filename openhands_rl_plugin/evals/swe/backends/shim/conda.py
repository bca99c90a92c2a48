"""``conda create``, ``env create``, ``env update`` and ``install`` by way of a virtual environment and uv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from common import ENVIRONMENTS, SEEDS, prefix, say, uv_install

# Names on conda-forge -> names on PyPI. ``None``: a library or program that is no Python package,
# or a package that needs one.
NAMES: dict[str, str | None] = {
    **{
        "python-graphviz": "graphviz",
        "python-xxhash": "xxhash",
        "python-blosc": "blosc",
        "pytables": "tables",
        "pytorch": "torch",
        "tiledb-py": "tiledb",
        "iris": "scitools-iris",
        "netcdf4": "netCDF4",
        "matplotlib-base": "matplotlib",
        "msgpack-python": "msgpack",
        "pyqt": "PyQt5",
        "lz4-c": "lz4",
        "pyyaml": "PyYAML",
        "seaborn-base": "seaborn",
        "dask-core": "dask",
        "ray-core": "ray",
        "faker": "Faker",
        "pydata-sphinx-theme": "pydata-sphinx-theme",
    },
    **dict.fromkeys(
        (
            *("graphviz", "nodejs", "compilers", "gcc", "gxx", "cxx-compiler", "c-compiler", "git", "make", "cmake"),
            *("hdf5", "libnetcdf", "eccodes", "esmpy", "pandoc", "openssl", "ninja", "llvm-openmp", "mkl", "blas"),
            *("ffmpeg", "imagemagick", "firefox", "geckodriver", "texlive-core", "libxml2", "boost-cpp", "nomkl"),
            *("libopenblas", "tk", "ca-certificates", "jre", "openjdk", "selenium-manager"),
            # Cannot be imported without eccodes.
            "cfgrib",
        )
    ),
}


def main(words: list[str]) -> int:
    """Run one conda command; the exit status is conda's."""
    match words:
        case ["create", *rest]:
            return create(rest)
        case ["env", "create" | "update", *rest]:
            return from_file(rest)
        case ["install", *rest]:
            return install(prefix(), packages_in(rest))
        case _:
            say(f"conda {' '.join(words)} is left out")
            return 0


def create(words: list[str]) -> int:
    """``create -n NAME python=3.9 PACKAGES``."""
    environment = ENVIRONMENTS / (value_of(words, "-n", "--name") or "testbed")
    seeds = () if "--no-default-packages" in words else SEEDS
    return new(environment, seeds) or install(environment, packages_in(words))


def from_file(words: list[str]) -> int:
    """``env create|update --file environment.yml``."""
    text = Path(value_of(words, "-f", "--file") or "environment.yml").read_text(encoding="utf-8")
    named = re.search(r"^name:\s*(\S+)", text, re.MULTILINE)
    environment = ENVIRONMENTS / (value_of(words, "-n", "--name") or (named[1] if named else "testbed"))
    if not environment.exists() and (failed := new(environment)):
        return failed
    from_conda, from_pip = dependencies(text)
    return install(environment, from_conda) or install_listed(environment, from_pip)


def new(environment: Path, seeds: Iterable[str] = SEEDS) -> int:
    """A virtual environment of the wanted Python, with what conda always puts there."""
    made = subprocess.run([os.environ["SHIM_PYTHON"], "-m", "venv", "--without-pip", str(environment)], check=False)
    return made.returncode or (uv_install(*seeds, environment=environment) if seeds else 0)


def install(environment: Path, specifications: Iterable[str]) -> int:
    """Packages by conda's names, as far as they install: what conda has and PyPI has not is left out."""
    install_parts(environment, [each for each in map(requirement, specifications) if each])
    return 0


def install_parts(environment: Path, wanted: list[str]) -> None:
    """All together, so that their versions fit; when one of them does not install, each half by itself."""
    if not wanted or not uv_install(*wanted, environment=environment):
        return
    if len(wanted) == 1:
        say(f"{wanted[0]} is left out: it does not install")
        return
    middle = len(wanted) // 2
    install_parts(environment, wanted[:middle])
    install_parts(environment, wanted[middle:])


def install_listed(environment: Path, lines: list[str]) -> int:
    """The pip part of an ``environment.yml``, which may hold any line of a requirements file."""
    if not lines:
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir="/tmp") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        if not uv_install("-r", file.name, environment=environment):
            return 0
    return install(environment, lines)


def packages_in(words: list[str]) -> Iterator[str]:
    """The words that are neither options nor their values."""
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-n", "--name", "-c", "--channel", "-f", "--file", "-p", "--prefix"):
            skip = True
        elif not word.startswith("-"):
            yield word


def value_of(words: list[str], *names: str) -> str | None:
    """The value of an option."""
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word in names), None)


def requirement(specification: str) -> str | None:
    """``numpy=1.19`` or ``conda-forge::numpy >=1.19`` -> a requirement of pip; ``None`` for what pip cannot install."""
    text = specification.split("::")[-1].strip().strip("'\"")
    match = re.fullmatch(r"([A-Za-z0-9_.\-]+(?:\[[^\]]*\])?)\s*(.*)", text)
    if match is None:
        return text if "://" in text else None
    name, constraint = match[1].lower(), match[2].replace(" ", "")
    if name in ("python", "python_abi"):
        return None
    name = NAMES.get(name, name)
    if name is None:
        return None
    # conda's `=1.19` is a prefix, and a build string may follow.
    if single := re.fullmatch(r"=([^=<>!,]+)(?:=.*)?", constraint):
        constraint = f"=={single[1].removesuffix('.*').removesuffix('*').rstrip('.')}.*"
    return name + constraint


def dependencies(text: str) -> tuple[list[str], list[str]]:
    """The lists below ``dependencies:`` and below its ``pip:``. Reads the plain YAML that such files are written in."""
    from_conda: list[str] = []
    from_pip: list[str] = []
    inside, pip_indent = False, -1
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not bare.strip():
            continue
        indent = len(bare) - len(bare.lstrip())
        if not bare.lstrip().startswith("-"):
            inside, pip_indent = bare.strip() == "dependencies:", -1
            continue
        item = bare.lstrip().removeprefix("-").strip().strip("'\"")
        if not inside:
            continue
        if item == "pip:":
            pip_indent = indent
        elif 0 <= pip_indent < indent:
            from_pip.append(item)
        else:
            pip_indent = -1
            from_conda.append(item)
    return from_conda, from_pip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
