"""Sources of tasks: a release on the package index, an archive, a git repository, or a plan with many packages."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.core.validation import problems

SUITE = "swe-local"
SUITE_PLAN = "swe_local.toml"
SUITE_TASKS = "swe_local.jsonl"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"[0-9][A-Za-z0-9.!+_-]*?"
_RELEASE = re.compile(rf"(?P<name>{_NAME})==((?P<previous>{_VERSION})\.\.)?(?P<version>{_VERSION})")


class Release(Frozen):
    """A version on the package index. ``sha256`` is that of its source archive; empty: whatever the index gives."""

    version: str
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class Package(Frozen):
    """One package and how its tests run.

    Exactly one of ``release``, ``archive`` and ``git`` says where it comes from. ``previous`` is an older release: what
    changed since is put back as a bug. ``tests`` are pytest's arguments and ``paths`` the folders that are imported
    from; both are found when left empty. ``requirements`` are installed beside those of the plan and the package's own.
    """

    name: str = Field(pattern=rf"^{_NAME}$")
    release: Release | None = None
    previous: Release | None = None
    archive: Path | None = None
    git: str | None = None
    commit: str = "HEAD"
    split: Literal["train", "heldout", ""] = ""
    tests: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    """Tests whose names contain one of these are left alone."""
    license: str = ""
    """Under which its functions are published in repair tasks."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if sum(each is not None for each in (self.release, self.archive, self.git)) != 1:
            raise ValueError("give one of release, archive and git")
        return self

    @property
    def label(self) -> str:
        """The package's name and version, for messages."""
        return f"{self.name} {self.release.version}" if self.release else self.name


class TaskPlan(Frozen):
    """Packages and what is made of them. ``requirements`` go into every environment, ``python`` is its version."""

    packages: tuple[Package, ...] = Field(min_length=1)
    python: str = Field(default="3.12", pattern=r"^3\.1\d$")
    requirements: tuple[str, ...] = ("pytest==8.4.2",)
    per_package: int = Field(default=4, ge=1, le=1000)
    seed: int = 1
    timeout: float = Field(default=60.0, gt=0)
    """Seconds that one run of the tests may take."""
    least_share: float = Field(default=0.01, ge=0, le=0.5)
    """The fraction of the tests that a bug has to make fail, at least; one test in any case."""


def read_plan[Plan: TaskPlan](path: Path, kind: type[Plan] = TaskPlan) -> Plan:
    """A plan from a TOML file. Raises ``ConfigError``, a line for each thing that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        return kind.model_validate(tomllib.loads(text))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(where) or 'plan'} {what}" for where, what in problems(error, kind))
        raise ConfigError("\n".join(lines)) from error


def suite_file(name: str) -> Path:
    """A file that is published with the package."""
    return Path(str(files("openhands_rl_plugin.evals.tasks").joinpath("data", name)))


def tasks_file(name: str) -> Path:
    """The file of the rows of a suite, or the file of that name. Raises ``ConfigError`` where there is none."""
    if name == SUITE:
        return suite_file(SUITE_TASKS)
    if name in registry.names("suites") and (rows := registry.find("suites", name).rows) is not None:
        return rows
    if not Path(name).is_file():
        raise ConfigError(f"{name}: there is no such file; make one with `openhands-rl tasks make`, or give {SUITE}")
    return Path(name)


def parse_source(text: str) -> Package:
    """One SOURCE of the command line. Raises ``ConfigError`` for what is none.

    ``name==1.2``, ``name==1.1..1.2`` (with what changed between them), an archive, a git repository (``@commit``).
    """
    if found := _RELEASE.fullmatch(text):
        previous = Release(version=found["previous"]) if found["previous"] else None
        return Package(name=found["name"], release=Release(version=found["version"]), previous=previous)
    if re.fullmatch(_NAME, text) and not Path(text).exists():
        raise ConfigError(f"{text}: say which version, as {text}==1.0, so that the tasks can be made again")
    place, _, commit = text.partition("@") if not re.match(r"[\w.+-]+@|[a-z+]+://[^/]*@", text) else (text, "", "")
    if "://" in place or place.endswith(".git") or (Path(place) / ".git").exists() or (Path(place) / "HEAD").exists():
        where = place if "://" in place or not Path(place).exists() else str(Path(place).resolve())
        return Package(name=package_name(Path(place.rstrip("/")).resolve()), git=where, commit=commit or "HEAD")
    path = Path(text)
    if path.is_file():
        name = re.sub(r"\.(tar\.\w+|tgz|zip)$", "", path.name)
        return Package(name=re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-"), archive=path.resolve())
    raise ConfigError(f"{text} is no source: give name==version, an archive, a git repository, or a plan (.toml)")


def package_name(folder: Path) -> str:
    """The name of the package in the repository of that folder."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name.removesuffix(".git")).strip("._-")
    return name or "repository"
