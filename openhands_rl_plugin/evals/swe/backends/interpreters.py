"""Where a Python of a given version is on this machine: what ``uv python find`` finds."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.sandbox import installed_parts, is_system
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.types import Checkout


@functools.cache
def find_python(version: str) -> Path:
    """The program of a Python ``version`` ("3.9"), below ``bin`` of the folder that holds all of it; no virtual
    environment. Raises ``ConfigError`` that says how to get one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\.\d+)?", version)
    short = match[1] if match else "?"
    pyenv = Path("~/.pyenv/versions").expanduser().glob(f"{short}.*/bin")
    path = os.pathsep.join([f"{sys.base_prefix}/bin", *map(str, pyenv), os.environ.get("PATH", os.defpath)])
    find = [find_uv(), "python", "find", "--no-project", "--no-config", "--no-python-downloads", "--system", short]
    found = subprocess.run(find, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"Python {version:.20} is not installed; get it with: uv python install {short}")
    return Path(found.stdout.strip()).resolve()


@functools.cache
def find_uv() -> Path:
    """The program ``uv``, that of this environment before others. Raises ``ConfigError``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which("uv", path=path)) is None:
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
