"""The extension modules that an editable installation built, kept as long as nothing changes that they are built from.

At set-up a record is left in the environment. The scripts of tests install the project again; where it says the same,
nothing is compiled. It lies where no patch can write.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

from common import prefix

EDITABLE = ("-e", "--editable")
_MODULES = (".so", ".pyd")
_TEXTS = (".rst", ".md")
_BUILDS = ("setup", "build", "version")


def record(words: list[str]) -> None:
    """Note what was installed, where it has extension modules."""
    if project := only_project(words):
        files = [file for file in listed(project, "--others") if file.endswith(_MODULES)]
        if files:
            known = {"words": words, "modules": files, "sources": sources(project)}
            place(project).write_text(json.dumps(known))


def is_kept(words: list[str]) -> bool:
    """Whether that installation would make what is there."""
    project = only_project(words)
    if not project or not place(project).exists():
        return False
    known = json.loads(place(project).read_text())
    there = all(os.path.exists(os.path.join(project, file)) for file in known["modules"])
    return there and known["words"] == words and known["sources"] == sources(project)


def only_project(words: list[str]) -> str:
    """The folder of the one editable project that the words name, of which everything else is an option."""
    folders = [value.partition("[")[0] for name, value in pairwise(words) if name in EDITABLE]
    targets = [word for before, word in pairwise(["", *words]) if not word.startswith("-") and before[:1] != "-"]
    return os.path.realpath(folders[0]) if len(folders) == 1 and not targets else ""


def place(project: str) -> Path:
    """The record of a project."""
    return prefix() / f"built-{hashlib.sha256(project.encode()).hexdigest()[:16]}.json"


def sources(project: str) -> str:
    """A digest of the files that a build may read: all but the modules of Python packages, and texts. A module whose
    path says that it takes part in building counts, and so does every package that is there.
    """
    files = sorted({*listed(project, "--cached"), *listed(project, "--others", "--exclude-standard")})
    packages = {os.path.dirname(file) for file in files if os.path.basename(file) == "__init__.py"}
    digest = hashlib.sha256(json.dumps(sorted(packages)).encode())
    for file in files:
        folder, name = os.path.split(file)
        module = name.endswith(".py") and folder in packages and not any(word in file for word in _BUILDS)
        path = os.path.join(project, file)
        if module or name.endswith(_TEXTS) or not os.path.isfile(path):
            continue
        with open(path, "rb") as content:
            digest.update(json.dumps([file, hashlib.file_digest(content, "sha256").hexdigest()]).encode())
    return digest.hexdigest()


def listed(project: str, *options: str) -> list[str]:
    """Files of the project by git; none where it has no repository."""
    command = ["git", "-C", project, "ls-files", "-z", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [file for file in done.stdout.split("\0") if file]
