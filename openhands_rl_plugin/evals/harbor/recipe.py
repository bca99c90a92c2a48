"""What a task's Dockerfile asks for, as far as it can be had without Docker; what cannot is named."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.harbor.shell_text import commands_of, package_names, pip_words, read_pip

# Images that hold a general system and nothing of a task: this machine's programs stand in for theirs.
_PLAIN_BASE = re.compile(
    r"(docker\.io/|library/|public\.ecr\.aws/docker/library/)*"
    r"(?P<name>ubuntu|debian|python|buildpack-deps|bash|busybox|ghcr\.io/laude-institute/t-bench/[\w-]+)(:(?P<tag>[\w.-]+))?"
    r"(@sha256:\w+)?"
)
_PYTHON = re.compile(r"(\d\.\d+)")
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
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")


class BuildStep(Frozen):
    """``copy``: ``words`` are the sources and, last, the target; ``run``: a shell's words. ``mode``: ``--chmod``.
    ``variables`` are those set so far. ``incomplete``: it installs what is ``missing``, and may fail if forced.
    """

    kind: Literal["copy", "run"]
    words: tuple[str, ...]
    workdir: str
    mode: str = ""
    variables: dict[str, str] = Field(default_factory=dict)
    incomplete: bool = False


class ContainerRecipe(Frozen):
    """The content of a task's environment. ``python`` is a version that the base image is of; ``requirements`` are its
    pip packages, ``packages`` the system's; ``missing`` says, a line each, what this machine cannot give."""

    base: str = ""
    workdir: str = "/app"
    variables: dict[str, str] = Field(default_factory=dict)
    steps: tuple[BuildStep, ...] = ()
    python: str = ""
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
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
        self.shell = ["/bin/sh", "-c"]
        self.requirements: list[str] = []
        self.packages: list[str] = []
        self.missing: list[str] = []

    def recipe(self) -> ContainerRecipe:
        return ContainerRecipe(
            base=self.base,
            workdir=self.workdir,
            variables=self.variables,
            steps=tuple(self.steps),
            python=self.python,
            requirements=tuple(dict.fromkeys(self.requirements)),
            packages=tuple(dict.fromkeys(self.packages)),
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
        elif instruction == "SHELL":
            self.shell = _listed(rest) or []
            if self.shell[:1] and self.shell[0].rpartition("/")[2] not in ("sh", "bash"):
                self.missing.append(f"SHELL {rest:.60}")
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
        options, plain = [], rest
        while found := re.match(r"--\S+\s+", plain):
            options.append(found[0].strip())
            plain = plain[found.end() :]
        names = _listed(plain)
        names = [self._expanded(word) for word in (_words(plain) if names is None else names)]
        remote = any("://" in word or word.startswith("git@") for word in names[:-1])
        archive = instruction == "ADD" and any(re.search(r"\.(tar|tgz|gz|bz2|xz)\b", word) for word in names[:-1])
        known = all(option.startswith(("--chmod=", "--chown=", "--link")) for option in options)
        if "<<" in rest or remote or archive or len(names) < 2 or not known:
            self.missing.append(f"{instruction} {rest:.60}".split("\n")[0])
            return
        mode = next((option.partition("=")[2] for option in options if option.startswith("--chmod=")), "")
        self.steps.append(BuildStep(kind="copy", words=tuple(names), workdir=self.workdir, mode=mode))

    def _run(self, rest: str) -> None:
        command, shell = rest, self.shell
        if whole := re.match(r"<<-?\s*['\"]?(\w+)['\"]?[ \t]*\n", rest):
            command = rest[whole.end() :].rpartition("\n")[0]  # the heredoc is the script
        elif (listed := _listed(rest)) is not None:
            command = shlex.join(listed)
        if rest.startswith("--") or command.startswith("#!") or re.search(_HEREDOC, command.split("\n")[-1]):
            self.missing.append(f"RUN {rest:.60}".split("\n")[0])
            return
        absent = [what for words in commands_of(command) for what in self._installs(words)]
        self.missing += absent
        self.steps.append(
            BuildStep(
                kind="run",
                words=(*shell, command),
                workdir=self.workdir,
                variables=dict(self.variables),
                incomplete=bool(absent),
            )
        )

    def _installs(self, words: list[str]) -> list[str]:
        """What a command installs and is not to be had otherwise."""
        program = words[0].rpartition("/")[2]
        command = f"RUN {' '.join(words):.60}"
        if program in ("apt-get", "apt"):
            names = [self._expanded(name) for name in package_names(words)]
            self.packages += names
            odd = any(word in ("remove", "purge", "autoremove", "source", "build-dep") for word in words[1:2])
            return [command] if odd else [f"the package {name}" for name in missing_packages(names)]
        if (pip := pip_words(words)) is not None:
            wanted, complete = read_pip([self._expanded(word) for word in pip], lambda name: None)
            self.requirements += wanted
            return [] if complete and (words[0] == program or program == "uv") else [command]
        if program in _INSTALLERS or words[:2] == ["git", "clone"]:
            return [command]
        return []

    def _expanded(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            name, otherwise = found[1] or found[3], found[2]
            return self.variables.get(name) or (found[0] if otherwise is None else otherwise)

        return re.sub(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))", value, text)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile; continued lines are joined, a heredoc's lines belong to its instruction."""
    lines = deque(text.splitlines())
    while lines:
        parts: list[str] = []
        while lines:
            line = lines.popleft()
            if line.lstrip().startswith("#") or (parts and not line.strip()):
                continue
            continued = re.fullmatch(r"(.*)\\[ \t]*", line)
            parts.append(continued[1] if continued else line)
            if not continued:
                break
        instruction, _, rest = " ".join(parts).strip().partition(" ")
        if instruction.upper() in ("RUN", "COPY", "ADD"):
            for found in _HEREDOC.finditer(rest.split("\n")[0]):
                ends = [
                    at for at, line in enumerate(lines) if line.lstrip("\t" if "<<-" in found[0] else "") == found[2]
                ]
                for _ in range(ends[0] + 1 if ends else 0):
                    rest += f"\n{lines.popleft()}"
        if instruction:
            yield instruction.upper(), rest.strip()


def _listed(text: str) -> list[str] | None:
    """The words of an instruction in its JSON form; ``None`` for another one."""
    try:
        found = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return None
    return found if isinstance(found, list) and found and all(isinstance(word, str) for word in found) else None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _joined(before: str, path: str) -> str:
    return path if path.startswith("/") else f"{before.rstrip('/')}/{path}"
