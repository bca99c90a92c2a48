"""What a task's ``tests/test.sh`` installs before it tests, which has to be there without a network."""

from __future__ import annotations

import re
from pathlib import Path

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.harbor.recipe import missing_packages
from openhands_rl_plugin.evals.harbor.shell_text import (
    commands_of,
    package_names,
    pip_words,
    read_pip,
    requirement_lines,
)

# Test scripts fetch these by ``apt-get`` only to install uv or pytest with them.
_HELPERS = frozenset({"curl", "wget", "ca-certificates", "python3", "python3-pip", "python3-venv", "git"})
_NOT_HERE = frozenset({"docker", "npm", "npx", "cargo", "go", "conda", "mamba", "gem", "yarn", "pnpm"})
_UV_VALUES = re.compile(
    r"-[pw]|--(python|with|from|with-requirements|(extra-)?index-url|index|cache-dir|color|index-strategy)"
)
_UV_FLAGS = re.compile(
    r"-qq?|-[vnU]|--(quiet|verbose|no-cache|isolated|no-project|offline|refresh|no-config|no-progress|native-tls|active"
    r"|no-sync|frozen|managed-python|system|upgrade|dev|seed|clear)"
)


class TestNeeds(Frozen):
    """``python`` is a version ("3.13") or empty. ``requirements`` are pip packages, ``packages`` those of the system;
    ``missing``: what is not had."""

    __test__ = False

    python: str = ""
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def needs_of(script: Path) -> TestNeeds:
    """Read a script: its ``uvx``, ``uv`` and ``pip install`` lines name a Python and packages, ``apt-get`` others."""
    reader = _Reader(script.parent)
    for words in commands_of(script.read_text(encoding="utf-8", errors="replace")):
        reader.take(words)
    return TestNeeds(
        python=reader.python,
        requirements=tuple(dict.fromkeys(reader.requirements)),
        packages=tuple(dict.fromkeys(reader.packages)),
        missing=tuple(dict.fromkeys(f"{what} (tests/test.sh)" for what in reader.missing)),
    )


class _Reader:
    def __init__(self, tests: Path) -> None:
        self.python = self._directory = ""
        self.requirements: list[str] = []
        self.packages: list[str] = []
        self.missing: list[str] = []
        self._tests = tests

    def take(self, words: list[str]) -> None:
        program = words[0].rpartition("/")[2]
        pip = pip_words(words)
        if program == "cd":
            self._directory = words[1] if len(words) > 1 else ""
        elif program in ("apt-get", "apt"):
            names = package_names(words)
            self.packages += names
            self.missing += [
                f"the package {name}" for name in missing_packages([n for n in names if n not in _HELPERS])
            ]
        elif pip is not None:
            wanted, complete = read_pip(pip, self._listed)
            self.requirements += wanted
            if not complete or (words[0] != program and program != "uv"):
                self.missing.append(" ".join(words)[:60])
        elif program == "uvx":
            self._uv(words, 1, runs=True)
        elif program == "uv" and words[1:2] == ["tool"]:
            self._uv(words, 3, runs=words[2:3] == ["run"], adds=words[2:3] == ["install"])
        elif program == "uv" and words[1:2] in (["run"], ["venv"], ["add"]):
            self._uv(words, 2, adds=words[1] == "add")
        elif program == "uv" and words[1:2] not in (
            ["init"],
            ["python"],
            ["self"],
            ["cache"],
            ["--version"],
            ["version"],
        ):
            self.missing.append(" ".join(words)[:60])
        elif program in _NOT_HERE:
            self.missing.append(program)

    def _listed(self, name: str) -> list[str] | None:
        """The lines of a requirements file of the tests."""
        whole = name if name.startswith("/") else f"{self._directory}/{name}"
        file = self._tests / whole.removeprefix("/tests/")
        if not whole.startswith("/tests/") or not file.resolve().is_relative_to(self._tests.resolve()):
            return None
        return requirement_lines(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None

    def _uv(self, words: list[str], at: int, *, runs: bool = False, adds: bool = False) -> None:
        """The Python and the packages of one ``uv`` command, whose options begin at ``at``."""
        wanted: list[str] = []
        source = False
        while at < len(words) and words[at].startswith("-"):
            option, given, value = words[at].partition("=") if words[at].startswith("--") else (words[at], "", "")
            if _UV_VALUES.fullmatch(option) and not given:
                at += 1
                value = words[at] if at < len(words) else ""
            at += 1
            if option in ("-p", "--python"):
                self.python = self.python or _version(value)
            elif option in ("-w", "--with", "--from"):
                source = source or option == "--from"
                wanted += value.split(",")
            elif option == "--with-requirements":
                wanted += ["-r", value]
            elif option == "--":
                break
            elif not _UV_FLAGS.fullmatch(option) and not _UV_VALUES.fullmatch(option):
                self.missing.append(f"{words[0]} {option}")
        rest = words[at:]
        if runs and rest and not source:
            name, _, version = rest[0].partition("@")
            named = {re.split(r"[^\w.-]", each)[0] for each in wanted}
            wanted += [] if name in named else [f"{name}=={version}" if re.match(r"\d", version) else name]
        found, complete = read_pip(["install", *wanted, *(rest if adds else [])], self._listed)
        self.requirements += found
        if not complete:
            self.missing.append(" ".join(words)[:60])


def _version(text: str) -> str:
    return ".".join(text.split(".")[:2]) if re.match(r"\d", text) else ""
