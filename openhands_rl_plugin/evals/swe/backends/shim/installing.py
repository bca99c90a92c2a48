"""``installing.py conda|pip WORDS...``: conda and pip of the official scripts by way of uv, which can leave out what
the index did not have at a date (``UV_EXCLUDE_NEWER``). It runs inside the sandbox by the Python of this package.

It translates what the scripts of swebench 4.1.0 contain: conda's ``create``, ``install``, ``env create`` and ``env
update`` (xarray and matplotlib have an ``environment.yml``), pip's ``install`` and ``uninstall``. Anything else fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ENVIRONMENT = Path("/conda/envs/testbed")
PYTHON = str(ENVIRONMENT / "bin" / "python")
INSTALLED = ENVIRONMENT / "editable.json"
OFFLINE = bool(os.environ.get("UV_OFFLINE"))
SEEDS = ("pip", "setuptools", "wheel")
"""What conda puts into every environment with Python."""

RENAMED = {
    **{"dask-core": "dask", "iris": "scitools-iris", "matplotlib-base": "matplotlib", "pyqt": "PyQt5"},
    "seaborn-base": "seaborn",
}
"""Names on conda-forge -> names on PyPI."""
NO_PACKAGES = {
    *("cfgrib", "eccodes", "esmpy", "ffmpeg", "graphviz", "hdf5", "imagemagick", "libnetcdf", "make", "pandoc"),
    *("python", "texlive-core", "tk"),
}
"""On conda-forge no Python packages, or one that needs one of these."""

VALUES_OF_CONDA = ("-n", "--name", "-c", "--channel", "-f", "--file")
WITHOUT_EFFECT = {"--no-use-pep517", "--verbose", "-v"}
LEGACY = ("--config-setting", "editable_mode=compat")
"""Makes setuptools link an editable project's folder, as ``setup.py develop`` does, instead of installing a finder."""


def main(words: list[str]) -> int:
    """Run one command; the exit status is that of the program which did it last."""
    if constraints := os.environ.get("PIP_CONSTRAINT"):
        os.environ["UV_CONSTRAINT"] = os.environ["UV_BUILD_CONSTRAINT"] = constraints
    command = " ".join(words[1:3] if words[1:2] == ["env"] else words[1:2])
    if words[0] == "conda" and command in ("create", "install", "env create", "env update"):
        return conda(command, words[2:])
    if words[0] == "pip" and command == "install":
        return install(words[2:])
    if words[0] == "pip" and command == "uninstall":
        return uv("uninstall", *(word for word in words[2:] if not word.startswith("-")))
    say(f"{' '.join(words)} cannot be run here: {words[0]} {command} is not translated")
    return 1


def conda(command: str, words: list[str]) -> int:
    """One command for the environment ``testbed``. What conda has and PyPI has not is left out."""
    if command != "install" and not ENVIRONMENT.exists():
        made = subprocess.run([os.environ["SHIM_PYTHON"], "-m", "venv", "--without-pip", str(ENVIRONMENT)], check=False)
        if made.returncode or ("--no-default-packages" not in words and uv("install", *SEEDS)):
            return 1
    values = [(name, value) for name, value in pairwise(["", *words]) if not value.startswith("-")]
    packages, requirements = [value for name, value in values if name not in VALUES_OF_CONDA], list[str]()
    if command.startswith("env"):
        file = next((value for name, value in values if name in ("-f", "--file")), "environment.yml")
        packages, requirements = dependencies(Path(file).read_text("utf-8"))
    install_parts([each for each in map(requirement, packages) if each])
    install_parts(requirements)
    return 0


def requirement(specification: str) -> str | None:
    """``numpy=1.19`` or ``conda-forge::numpy >=1.19`` -> a requirement of pip; ``None`` for what pip cannot install."""
    text = specification.split("::")[-1].strip().strip("'\"")
    match = re.fullmatch(r"([A-Za-z0-9_.\-]+(?:\[[^\]]*\])?)\s*(.*)", text)
    if match is None:
        return text if "://" in text else None
    name, constraint = match[1].lower(), match[2].replace(" ", "")
    # conda's `=1.19` is a prefix, and a build string may follow.
    if single := re.fullmatch(r"=([^=<>!,]+)(?:=.*)?", constraint):
        constraint = f"=={single[1].removesuffix('.*').removesuffix('*').rstrip('.')}.*"
    return None if name in NO_PACKAGES else RENAMED.get(name, name) + constraint


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


def install(words: list[str]) -> int:
    """By uv; where uv refuses a project, as it does some before ``pyproject.toml``, its dependencies by uv and the
    project by pip. Tests install their project again, which takes minutes where something is compiled: not unless
    something has changed that it is built from.
    """
    translated = ["-e" if word in ("-ve", "--editable") else word for word in words if word not in WITHOUT_EFFECT]
    folders = [value.partition("[")[0] for name, value in pairwise(translated) if name == "-e"]
    note = [words, os.getcwd()]
    if OFFLINE and folders and is_unchanged(note):
        say("nothing has changed that the installed project is built from")
        return 0
    # As pip runs ``setup.py develop``.
    modern = [os.path.exists(f"{each}/pyproject.toml") for each in folders if os.path.exists(f"{each}/setup.py")]
    legacy = LEGACY if modern and (not any(modern) or "--no-use-pep517" in words) else ()
    if status := uv("install", *translated, *legacy):
        say("uv could not install that; pip tries")
        uv("install", *SEEDS)
        alone = ["--no-deps"] * (not uv("install", *(word for word in translated if word != "-e")))
        offline = ["--no-index", "--no-build-isolation"] * OFFLINE
        status = subprocess.run([PYTHON, "-m", "pip", "install", *alone, *offline, *words], check=False).returncode
    if not status and not OFFLINE and folders:
        INSTALLED.write_text(json.dumps(note))
    return status


def is_unchanged(note: list[object]) -> bool:
    """Whether set-up installed just that, and of git's files only texts have changed since, and modules whose path does
    not say that they take part in building.
    """
    if not INSTALLED.exists() or json.loads(INSTALLED.read_text()) != note:
        return False
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [line[3:].strip('"') for line in done.stdout.splitlines()]
    texts = [name.endswith((".py", ".rst", ".md")) and not re.search("setup|build|version", name) for name in names]
    return not done.returncode and all(texts)


def uv(*words: str) -> int:
    """``uv pip WORDS`` for the environment; returns the exit status."""
    command = [os.environ["SHIM_UV"], "pip", words[0], "--python", PYTHON, *words[1:]]
    return subprocess.run(command, check=False).returncode


def say(text: str) -> None:
    """One line on stderr, marked as neither conda's nor pip's."""
    print(f"shim: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
