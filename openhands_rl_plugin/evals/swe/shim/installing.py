"""``installing.py conda|pip WORDS...``: conda and pip of the official scripts by way of uv, which can leave out what
the index did not have at a date (``UV_EXCLUDE_NEWER``). It runs inside the sandbox by the Python of this package.

It translates what the scripts of swebench 4.1.0 contain, but for an ``environment.yml``: conda's ``create``, pip's
``install`` and ``uninstall``. Anything else fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ENVIRONMENT = Path("/conda/envs/testbed")
PYTHON = str(ENVIRONMENT / "bin" / "python")
INSTALLED = ENVIRONMENT / "editable.json"
OFFLINE = bool(os.environ.get("UV_OFFLINE"))
SEEDS = ("pip", "setuptools", "wheel")
"""Packages that conda installs into every environment with Python."""

WITHOUT_EFFECT = {"--no-use-pep517", "--verbose", "-v"}
LEGACY = ("--config-setting", "editable_mode=compat")
"""Makes setuptools link an editable project's folder, as ``setup.py develop`` does, instead of installing a finder."""


def main(words: list[str]) -> int:
    """Run one command; the exit status is that of the program which did it last."""
    if constraints := os.environ.get("PIP_CONSTRAINT"):
        os.environ["UV_CONSTRAINT"] = os.environ["UV_BUILD_CONSTRAINT"] = constraints
    match words:
        case ["conda", "create", *rest]:
            return create(rest)
        case ["pip", "install", *rest]:
            return install(rest)
        case ["pip", "uninstall", *rest]:
            return uv("uninstall", *(word for word in rest if not word.startswith("-")))
    say(f"{' '.join(words)} cannot be run here: it is not translated")
    return 1


def create(words: list[str]) -> int:
    """Make the environment ``testbed`` with the named packages."""
    unwanted = ("-", "python=", ENVIRONMENT.name)
    packages = [word for word in words if not word.startswith(unwanted)]
    packages += SEEDS if "--no-default-packages" not in words else ()
    made = subprocess.run([os.environ["SHIM_PYTHON"], "-m", "venv", "--without-pip", str(ENVIRONMENT)], check=False)
    return made.returncode or (uv("install", *packages) if packages else 0)


def install(words: list[str]) -> int:
    """Install by uv. If uv refuses a project, as some without ``pyproject.toml``, install the project itself by pip.

    Tests install their project again, which may compile for minutes. It is skipped if no source file has changed.
    """
    translated = ["-e" if word in ("-ve", "--editable") else word for word in words if word not in WITHOUT_EFFECT]
    folders = [value.partition("[")[0] for name, value in pairwise(translated) if name == "-e"]
    note: list[object] = [words, os.getcwd()]
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
