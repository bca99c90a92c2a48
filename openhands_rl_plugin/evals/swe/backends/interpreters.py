"""Where a Python of a given version is on this machine: pyenv's, uv's, or one on the path."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.sandbox import installed_parts, is_system
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.types import Checkout


class Interpreter(NamedTuple):
    """A Python and the folder that holds all of it; neither is a virtual environment."""

    program: Path
    prefix: Path


@functools.cache
def find_python(version: str) -> Interpreter:
    """A Python ``version`` ("3.9"). Raises ``ConfigError`` that says how to get one."""
    if not re.fullmatch(r"\d+(\.\d+){0,2}", version):
        raise ConfigError(f"{version!r:.50} is no version of Python")
    short = ".".join(version.split(".")[:2])
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser().glob(f"versions/{short}.*/bin")
    path = os.pathsep.join([f"{sys.base_prefix}/bin", *map(str, pyenv), os.environ.get("PATH", os.defpath)])
    find = [find_uv(), "python", "find", "--no-project", "--no-config", "--no-python-downloads", "--system", short]
    found = subprocess.run(find, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"Python {short} is not installed; get it with: uv python install {short} (or pyenv install)")
    ask = [found.stdout.strip(), "-I", "-c", "import sys; print(sys.base_prefix)"]
    prefix = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    inside = prefix / "bin" / f"python{short}"
    return Interpreter(inside if inside.exists() else Path(os.path.realpath(ask[0])), prefix)


@functools.cache
def find_uv() -> Path:
    """The program ``uv``, that of this environment before others. Raises ``ConfigError``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := os.environ.get("UV") or shutil.which("uv", path=path)) is None:
        raise ConfigError("uv is not installed, which environments are made with; get it with: pip install uv")
    return Path(found).resolve()


def with_own_interpreter(directory: Path) -> Checkout:
    """A checkout whose commands have the Python that runs this program."""
    prefix = Path(sys.base_prefix).resolve()
    parts = [] if is_system(prefix.parts[1]) else installed_parts(prefix)
    return Checkout(
        directory=directory,
        mounts=tuple(WorkspaceMount(host=part, inside=str(part)) for part in parts),
        variables={"PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )
