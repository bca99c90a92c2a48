"""``installing.py conda|pip WORDS...``: conda and pip of the official scripts by way of uv, which can leave out what
the index did not have at a date (``UV_EXCLUDE_NEWER``). It runs inside the sandbox by the Python of this package.

Golds need all of this and no other way gives it: conda's commands and names those of dask, pandas, modin, xarray and
matplotlib, whose environments are an ``environment.yml``; pip's options, and pip itself where uv refuses a project,
those of repositories before ``pyproject.toml``; what is not installed again those with extension modules (astropy,
scikit-learn, matplotlib), which take minutes to compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ENVIRONMENT = Path("/conda/envs/testbed")
PYTHON = str(ENVIRONMENT / "bin" / "python")
OFFLINE = bool(os.environ.get("UV_OFFLINE"))
SEEDS = ("pip", "setuptools", "wheel")
"""What conda puts into every environment with Python."""

RENAMED = {
    "dask-core": "dask",
    "iris": "scitools-iris",
    "lz4-c": "lz4",
    "matplotlib-base": "matplotlib",
    "msgpack-python": "msgpack",
    "pyqt": "PyQt5",
    "pytables": "tables",
    "python-blosc": "blosc",
    "python-graphviz": "graphviz",
    "python-xxhash": "xxhash",
    "pytorch": "torch",
    "ray-core": "ray",
    "seaborn-base": "seaborn",
    "tiledb-py": "tiledb",
}
"""Names on conda-forge -> names on PyPI."""
NO_PACKAGES = {
    *("blas", "boost-cpp", "c-compiler", "ca-certificates", "cfgrib", "cmake", "compilers", "cxx-compiler", "eccodes"),
    *("esmpy", "ffmpeg", "firefox", "gcc", "geckodriver", "git", "graphviz", "gxx", "hdf5", "imagemagick", "jre"),
    *("libnetcdf", "libopenblas", "libxml2", "llvm-openmp", "make", "mkl", "ninja", "nodejs", "nomkl", "openjdk"),
    *("openssl", "pandoc", "python", "python_abi", "selenium-manager", "texlive-core", "tk"),
}
"""On conda-forge no Python packages, or one that needs one of these."""

OPTIONS_OF_CONDA = ("-n", "--name", "-c", "--channel", "-f", "--file", "-p", "--prefix")
IGNORED = {
    *("--ignore-requires-python", "--no-clean", "--no-input", "--no-use-pep517", "--no-warn-script-location"),
    *("--prefer-binary", "--quiet", "--use-pep517", "--user", "--verbose", "-q", "-v", "-vv", "-vvv"),
}
IGNORED_WITH_VALUE = {"--log", "--progress-bar", "--retries", "--root-user-action", "--timeout", "--upgrade-strategy"}
OTHERWISE = {"-I": "--reinstall", "--ignore-installed": "--reinstall", "-ve": "-e", "--config-settings": "-C"}
"""pip's options that uv does not know: without effect here, or under another name."""
LEGACY = ("--config-setting", "editable_mode=compat")
"""Makes setuptools link an editable project's folder, as ``setup.py develop`` does, instead of installing a finder."""
INSTALLED = ENVIRONMENT / "editable.json"


def main(words: list[str]) -> int:
    """Run one command; the exit status is that of the program which did it last."""
    if constraints := os.environ.get("PIP_CONSTRAINT"):
        os.environ["UV_CONSTRAINT"] = os.environ["UV_BUILD_CONSTRAINT"] = constraints
    return conda(words[1:]) if words[0] == "conda" else pip(words[1:])


def conda(words: list[str]) -> int:
    """``create``, ``env create``, ``env update`` and ``install``, for the environment ``testbed``; others are left out.

    What conda has and PyPI has not is left out, too.
    """
    command = " ".join(words[:2]) if words[:1] == ["env"] else words[0]
    if command not in ("create", "install", "env create", "env update"):
        say(f"conda {' '.join(words)} is left out")
        return 0
    if command != "install" and not ENVIRONMENT.exists():
        made = subprocess.run([os.environ["SHIM_PYTHON"], "-m", "venv", "--without-pip", str(ENVIRONMENT)], check=False)
        if made.returncode:
            return 1
        if "--no-default-packages" not in words and uv("install", *SEEDS):
            return 1
    if command.startswith("env"):
        named = [value for name, value in pairwise(words) if name in ("-f", "--file")]
        packages, requirements = dependencies(Path(named[0] if named else "environment.yml").read_text("utf-8"))
        install_parts([each for each in map(requirement, packages) if each])
        install_parts(requirements)
    else:
        install_parts([each for each in map(requirement, conda_packages(words[1:])) if each])
    return 0


def conda_packages(words: list[str]) -> Iterator[str]:
    """The words that are neither options nor their values."""
    waiting = iter(words)
    for word in waiting:
        if word in OPTIONS_OF_CONDA:
            next(waiting, None)
        elif not word.startswith("-"):
            yield word


def requirement(specification: str) -> str | None:
    """``numpy=1.19`` or ``conda-forge::numpy >=1.19`` -> a requirement of pip; ``None`` for what pip cannot install."""
    text = specification.split("::")[-1].strip().strip("'\"")
    match = re.fullmatch(r"([A-Za-z0-9_.\-]+(?:\[[^\]]*\])?)\s*(.*)", text)
    if match is None:
        return text if "://" in text else None
    name, constraint = match[1].lower(), match[2].replace(" ", "")
    if name in NO_PACKAGES:
        return None
    # conda's `=1.19` is a prefix, and a build string may follow.
    if single := re.fullmatch(r"=([^=<>!,]+)(?:=.*)?", constraint):
        constraint = f"=={single[1].removesuffix('.*').removesuffix('*').rstrip('.')}.*"
    return RENAMED.get(name, name) + constraint


def dependencies(text: str) -> tuple[list[str], list[str]]:
    """The lists below ``dependencies:`` and below its ``pip:``, in the plain YAML that such files are written in."""
    text = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    listed = re.split(r"\n(?=[^\s-])", text.partition("\ndependencies:")[2])[0]
    items = re.findall(r"^( *)-\s*['\"]?(.*?)['\"]?\s*$", listed, re.MULTILINE)
    first = items[0][0] if items else ""
    packages = [item for indent, item in items if indent == first and item != "pip:"]
    return packages, [item for indent, item in items if indent != first]


def install_parts(wanted: list[str]) -> None:
    """All together, so that their versions fit; when one of them does not install, each half by itself."""
    if not wanted:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir="/tmp") as file:
        file.write("\n".join(wanted) + "\n")
        file.flush()
        if not uv("install", "-r", file.name):
            return
    if len(wanted) == 1:
        say(f"{wanted[0]} is left out: it does not install")
        return
    middle = len(wanted) // 2
    install_parts(wanted[:middle])
    install_parts(wanted[middle:])


def pip(words: list[str]) -> int:
    """One command of pip."""
    command = next((word for word in words if not word.startswith("-")), "")
    rest = [word for word in words if word != command]
    if command == "install":
        return install(rest)
    if command == "uninstall":
        return uv("uninstall", *(word for word in rest if not word.startswith("-")))
    return uv(command, *rest) if command in ("freeze", "list", "show", "check") else own_pip(words)


def install(words: list[str]) -> int:
    """By uv; else the dependencies by uv and the project by pip; else all by pip."""
    translated = list(translate(words))
    if OFFLINE and is_installed(translated):
        say("nothing has changed that the installed project is built from")
        return 0
    status = uv("install", *translated, *(LEGACY if is_legacy(words) else ()))
    if status:
        say("uv could not install that; pip tries")
        if subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
            uv("install", *SEEDS)
        plain = [word for word in translated if word not in ("-e", "--editable")]
        alone = len(plain) < len(translated) and not uv("install", *plain)
        status = own_pip(["install", *(["--no-deps"] if alone else []), *words])
    if not status and not OFFLINE:
        note_installed(translated)
    return status


def translate(words: list[str]) -> Iterator[str]:
    """The same options in uv's words."""
    waiting = iter([part for word in words for part in (word.split("=", 1) if "--editable=" in word else [word])])
    for word in waiting:
        name, _, value = word.partition("=")
        if name in IGNORED_WITH_VALUE:
            if not value:
                next(waiting, None)
        elif word not in IGNORED:
            yield OTHERWISE.get(word, word)


def editable(words: list[str]) -> list[str]:
    """The folders of the editable projects."""
    return [value.partition("[")[0] for name, value in pairwise(words) if name in ("-e", "--editable")]


def is_legacy(words: list[str]) -> bool:
    """Whether pip would run ``setup.py develop``: for editable projects without a ``pyproject.toml``, or if asked."""
    projects = [each for each in editable(list(translate(words))) if os.path.exists(f"{each}/setup.py")]
    modern = [each for each in projects if os.path.exists(f"{each}/pyproject.toml")]
    return bool(projects) and (not modern or "--no-use-pep517" in words)


def note_installed(words: list[str]) -> None:
    """Note an editable project that set-up installed, where no patch can write."""
    if folders := editable(words):
        known = [words, os.path.realpath(folders[0]), [line for line in changes(folders[0]) if line.startswith("??")]]
        INSTALLED.write_text(json.dumps(known))


def is_installed(words: list[str]) -> bool:
    """Whether set-up installed just that, and only modules that exist and texts have changed since. A module whose path
    says that it takes part in building counts as what is built from.
    """
    folders = editable(words)
    if not folders or not INSTALLED.exists():
        return False
    known, folder, new = json.loads(INSTALLED.read_text())
    if known != words or folder != os.path.realpath(folders[0]):
        return False
    for line in changes(folder):
        name = line[3:].strip('"')
        module = name.endswith((".py", ".rst", ".md")) and not re.search("setup|build|version", name)
        if line not in new and (not module or (name.endswith("__init__.py") and line[:2] != " M")):
            return False
    return True


def changes(folder: str) -> list[str]:
    """What git says has changed in a project."""
    command = ["git", "-C", folder, "status", "--porcelain", "--untracked-files=all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [f"!! {done.stderr}"] if done.returncode else done.stdout.splitlines()


def own_pip(words: list[str]) -> int:
    """The environment's pip. Without a network it may not look for one, and cannot fetch what builds a project."""
    if OFFLINE and words[:1] == ["install"]:
        words = ["install", "--no-index", "--no-build-isolation", *words[1:]]
    return subprocess.run([PYTHON, "-m", "pip", *words], check=False).returncode


def uv(*words: str) -> int:
    """``uv pip WORDS`` for the environment; returns the exit status."""
    command = [os.environ["SHIM_UV"], "pip", words[0], "--python", PYTHON, *words[1:]]
    return subprocess.run(command, check=False).returncode


def say(text: str) -> None:
    """One line on stderr, marked as neither conda's nor pip's."""
    print(f"shim: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
