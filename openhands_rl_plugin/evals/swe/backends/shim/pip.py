"""``pip`` by way of uv, which can leave out what the index did not have at a date; the environment's own pip follows
where uv cannot do what is asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import built
from common import OFFLINE, SEEDS, python, say, uv, uv_install

# Options of ``pip install`` that uv does not know and that change nothing here.
DROPPED = {
    *("--no-use-pep517", "--use-pep517", "--user", "--no-cache-dir", "--disable-pip-version-check", "-v", "-vv"),
    *("-vvv", "--verbose", "-q", "--quiet", "--no-warn-script-location", "--prefer-binary", "--no-input", "-y"),
    *("--no-clean", "--root-user-action=ignore", "--progress-bar=off", "--ignore-requires-python"),
}
DROPPED_WITH_VALUE = {"--progress-bar", "--timeout", "--retries", "--root-user-action", "--cache-dir", "--log"}
RENAMED = {
    "--force-reinstall": "--reinstall",
    "--ignore-installed": "--reinstall",
    "-I": "--reinstall",
    "--pre": "--prerelease=allow",
    "-U": "--upgrade",
    "-C": "--config-setting",
    "--config-settings": "--config-setting",
}
LEGACY = ("--config-setting", "editable_mode=compat")
"""Makes setuptools link an editable project's folder, as ``setup.py develop`` does, instead of installing a finder."""


def main(words: list[str]) -> int:
    """Run one pip command; the exit status is that of the program which did it last."""
    at = next((index for index, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        return own_pip(words)
    rest = words[:at] + words[at + 1 :]
    commands: dict[str, Callable[[list[str]], int]] = {
        "install": install,
        "uninstall": lambda rest: uv("uninstall", *(word for word in rest if not word.startswith("-"))),
        **{name: lambda rest, name=name: uv(name, *rest) for name in ("freeze", "list", "show", "check")},
    }
    return commands[words[at]](rest) if words[at] in commands else own_pip(words)


def install(words: list[str]) -> int:
    """``pip install``: by uv; else the dependencies by uv and the project by pip; else all by pip."""
    translated = translate(words)
    if absent := next((file for file in listed_files(translated) if not os.path.exists(file)), None):
        say(f"could not open requirements file {absent}: no such file")
        return 1
    if OFFLINE and built.is_kept(translated):
        say("nothing has changed that the installed project is built from")
        return 0
    status = install_translated(words, translated)
    if not status and not OFFLINE:
        built.record(translated)
    return status


def install_translated(words: list[str], translated: list[str]) -> int:
    """The same with the options in both forms."""
    constrained = constraints()
    if not uv_install(*constrained, *translated, *(LEGACY if is_legacy(words) else ())):
        return 0
    say("uv could not install that; pip tries")
    if not has_pip() and uv_install(*SEEDS):
        return 1
    plain = [word for word in translated if word not in built.EDITABLE]
    if len(plain) < len(translated) and not uv_install(*constrained, *plain):
        return own_pip(["install", "--no-deps", *words])
    return own_pip(["install", *words])


def translate(words: list[str]) -> list[str]:
    """The same options in uv's words."""
    translated: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if word in DROPPED:
            continue
        if name in DROPPED_WITH_VALUE:
            if not value:
                next(waiting, None)
        elif len(word) > 2 and word[0] == "-" and word[1] in "vq" and word[1:].isalpha():
            # Short options written together, as in ``-ve .``.
            translated += [f"-{letter}" for letter in word[1:] if letter not in "vq"]
        elif word.startswith("-C") and len(word) > 2:
            translated += ["--config-setting", word[2:]]
        elif name in RENAMED:
            translated += [RENAMED[name], *([value] if value else [])]
        else:
            translated.append(word)
    return [word for word in translated if word]


def is_legacy(words: list[str]) -> bool:
    """Whether pip would run ``setup.py develop``: for editable projects without a ``pyproject.toml``, or if told to."""
    folders = [value.partition("[")[0] for name, value in pairwise(spread(words)) if name in built.EDITABLE]
    projects = [folder for folder in folders if os.path.exists(os.path.join(folder, "setup.py"))]
    told = "--no-use-pep517" in words
    return bool(projects) and all(told or not os.path.exists(f"{folder}/pyproject.toml") for folder in projects)


def spread(words: list[str]) -> list[str]:
    """The words with each value as a word of its own, as in ``-e .``."""
    return [part for word in translate(words) for part in (word.split("=", 1) if word.startswith("--") else [word])]


def listed_files(words: list[str]) -> list[str]:
    """The requirements files, as far as they are files of this machine."""
    options = ("-r", "--requirement", "-c", "--constraint")
    named = [value for name, value in pairwise(words) if name in options]
    named += [word.partition("=")[2] for word in words if word.startswith(("--requirement=", "--constraint="))]
    return [file for file in named if "://" not in file and file != "-"]


def constraints() -> list[str]:
    """``PIP_CONSTRAINT`` holds for what is installed and for what builds it."""
    file = os.environ.get("PIP_CONSTRAINT")
    return ["--constraints", file, "--build-constraints", file] if file and os.path.exists(file) else []


def has_pip() -> bool:
    """Whether the environment has a pip of its own."""
    return not subprocess.run([python(), "-m", "pip", "--version"], capture_output=True, check=False).returncode


def own_pip(words: list[str]) -> int:
    """The environment's pip. Without a network it may not look for one, and cannot fetch what builds a project."""
    if OFFLINE and words[:1] == ["install"]:
        words = ["install", "--no-index", "--no-build-isolation", *words[1:]]
    return subprocess.run([python(), "-m", "pip", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
