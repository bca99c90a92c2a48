"""What a task's Dockerfile asks for, as far as it can be had without Docker; what cannot is named."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen

# Images that hold a general system and nothing of a task: this machine's programs stand in for theirs.
_PLAIN_BASE = re.compile(
    r"(docker\.io/|library/|public\.ecr\.aws/docker/library/)*"
    r"(?P<name>ubuntu|debian|python|buildpack-deps|bash|busybox|ghcr\.io/laude-institute/t-bench/[\w-]+)(:(?P<tag>[\w.-]+))?"
    r"(@sha256:\w+)?"
)
_PYTHON = re.compile(r"(\d\.\d+)")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_INSTALLERS = frozenset(
    {
        "apk",
        "yum",
        "dnf",
        "npm",
        "npx",
        "yarn",
        "pnpm",
        "cargo",
        "rustup",
        "go",
        "gem",
        "conda",
        "mamba",
        "curl",
        "wget",
    }
    | {"add-apt-repository", "useradd", "adduser", "groupadd", "dpkg", "snap", "brew", "poetry", "systemctl", "uv"}
)
_CLEANING = re.compile(r"rm\s+-rf?\s+/var/(lib/apt|cache|log)\S*(\s+/\S+)*\s*\Z")
_OPTIONS_WITH_VALUE = frozenset(
    {"-t", "--target-release", "-o", "-i", "--index-url", "--extra-index-url", "-f", "--find-links"}
)


class BuildStep(Frozen):
    """``copy``: ``words`` are the sources and, last, the target; ``run``: one shell command. ``mode``: ``--chmod``."""

    kind: Literal["copy", "run"]
    words: tuple[str, ...]
    workdir: str
    mode: str = ""


class ContainerRecipe(Frozen):
    """The content of a task's environment. ``python`` is a version that the base image is of; ``requirements`` are its
    pip packages; ``missing`` says, a line each, what this machine cannot give."""

    base: str = ""
    workdir: str = "/app"
    variables: dict[str, str] = Field(default_factory=dict)
    steps: tuple[BuildStep, ...] = ()
    python: str = ""
    requirements: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def read_recipe(dockerfile: Path) -> ContainerRecipe:
    """The recipe of a ``Dockerfile``; an empty one where there is none."""
    if not dockerfile.is_file():
        return ContainerRecipe()
    reader = _Reader()
    for instruction, rest in _instructions(dockerfile.read_text(encoding="utf-8", errors="replace")):
        reader.take(instruction, rest)
    return reader.recipe()


def missing_packages(names: list[str]) -> list[str]:
    """Those of Debian's packages that are not installed here, by ``dpkg``, or as programs where there is none."""
    if shutil.which("dpkg-query") is None:
        return [name for name in names if shutil.which(name) is None]
    asked = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL).stdout
    here = {line.split()[0] for line in found.splitlines() if line.endswith(" installed")}
    return [name for name in names if name not in here and shutil.which(name) is None]


class _Reader:
    def __init__(self) -> None:
        self.base = self.python = ""
        self.workdir = "/"
        self.variables: dict[str, str] = {}
        self.steps: list[BuildStep] = []
        self.requirements: list[str] = []
        self.missing: list[str] = []

    def recipe(self) -> ContainerRecipe:
        return ContainerRecipe(
            base=self.base,
            workdir=self.workdir,
            variables=self.variables,
            steps=tuple(self.steps),
            python=self.python,
            requirements=tuple(dict.fromkeys(self.requirements)),
            missing=tuple(dict.fromkeys(self.missing)),
        )

    def take(self, instruction: str, rest: str) -> None:
        if instruction == "FROM":
            self._from(rest)
        elif instruction == "WORKDIR":
            self.workdir = _joined(self.workdir, self._expanded(rest.strip("\"'")))
        elif instruction in ("ENV", "ARG"):
            self._assign(rest, overwrite=instruction == "ENV")
        elif instruction in ("COPY", "ADD"):
            self._copy(instruction, rest)
        elif instruction == "RUN":
            self._run(rest)
        elif instruction == "USER" and rest not in ("root", "0"):
            self.missing.append(f"user {rest}")
        elif instruction in ("ENTRYPOINT", "VOLUME", "HEALTHCHECK", "ONBUILD"):
            self.missing.append(f"{instruction} {rest:.60}")

    def _from(self, rest: str) -> None:
        image = next(word for word in rest.split() if not word.startswith("--"))
        if self.base:
            self.missing.append(f"a second stage (FROM {image})")
        self.base = image
        known = _PLAIN_BASE.fullmatch(image)
        if known is None:
            self.missing.append(f"the image {image}")
        elif known["name"] == "python" and (version := _PYTHON.match(known["tag"] or "")):
            self.python = version[1]

    def _assign(self, rest: str, *, overwrite: bool) -> None:
        words = _words(rest)
        if words and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 else []
        for word in words:
            name, _, value = word.partition("=")
            if overwrite or name not in self.variables:
                self.variables[name] = self._expanded(value)

    def _copy(self, instruction: str, rest: str) -> None:
        words = _words(rest)
        options = [word for word in words if word.startswith("--")]
        plain = [self._expanded(word) for word in words if not word.startswith("--")]
        remote = any("://" in word or word.startswith("git@") for word in plain[:-1])
        archive = instruction == "ADD" and any(re.search(r"\.(tar|tgz|gz|bz2|xz)\b", word) for word in plain[:-1])
        if rest.startswith("<<") or remote or archive or len(plain) < 2 or any(o.startswith("--from") for o in options):
            self.missing.append(f"{instruction} {rest:.60}")
            return
        mode = next((option.partition("=")[2] for option in options if option.startswith("--chmod=")), "")
        self.steps.append(BuildStep(kind="copy", words=tuple(plain), workdir=self.workdir, mode=mode))

    def _run(self, rest: str) -> None:
        if rest.startswith(("<<", "[", "--")):
            self.missing.append(f"RUN {rest:.60}")
            return
        kept = []
        for command in _commands(rest):
            words = [word for word in _words(command) if word not in ("sudo", "set", "-e", "-x", "-ex", "-eux")]
            while words and _ASSIGNED.match(words[0]):
                words = words[1:]
            if words and not _CLEANING.match(command) and not self._installs(words, command):
                kept.append(command)
        if kept:
            self.steps.append(BuildStep(kind="run", words=(" && ".join(kept),), workdir=self.workdir))

    def _installs(self, words: list[str], command: str) -> bool:
        """Whether a command installs something; then it is had otherwise, or missing."""
        program = words[0].rpartition("/")[2]
        if program in ("apt-get", "apt"):
            names = _arguments(words[1:])
            if "install" in names:
                absent = missing_packages([name.partition("=")[0] for name in names if name != "install"])
                self.missing += [f"the package {name}" for name in absent]
            return True
        if program in ("python", "python3") and words[1:3] == ["-m", "pip"]:
            program, words = "pip", words[2:]
        if program == "uv" and words[1:3] == ["pip", "install"]:
            program, words = "pip", words[1:]
        if program in ("pip", "pip3"):
            names = _arguments(words[1:])
            if names[:1] == ["install"]:
                local = any(word in ("-r", "--requirement", "-e", "--editable") for word in words)
                if local or any("/" in name or name.startswith((".", "git+")) for name in names[1:]):
                    self.missing.append(f"RUN {command:.60}")
                else:
                    self.requirements += [name for name in names[1:] if name not in ("pip", "setuptools", "wheel")]
            return True
        if program in _INSTALLERS or words[:2] == ["git", "clone"]:
            self.missing.append(f"RUN {command:.60}")
            return True
        return False

    def _expanded(self, text: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda found: self.variables.get(found[1], found[0]), text)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction:
            yield instruction.upper(), rest.strip()


def _commands(line: str) -> list[str]:
    """The commands of a list; one with its own ``;`` or ``&&`` inside quotes, or a compound one, stays whole."""
    if re.search(r"['\"][^'\"]*(&&|;)[^'\"]*['\"]|\b(if|for|while|case)\b|\|\||\$\(", line):
        return [line]
    return [part.strip() for part in re.split(r"&&|;", line) if part.strip()]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _arguments(words: list[str]) -> list[str]:
    """The words that are no options, and no values of options."""
    return [
        word
        for at, word in enumerate(words)
        if not word.startswith("-") and not (at and words[at - 1] in _OPTIONS_WITH_VALUE)
    ]


def _joined(before: str, path: str) -> str:
    return path if path.startswith("/") else f"{before.rstrip('/')}/{path}"
