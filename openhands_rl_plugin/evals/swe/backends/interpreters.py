"""Where a Python of a given version is on this machine: pyenv's, uv's, or one on the path."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.visible import installed_parts, is_system
from openhands_rl_plugin.evals.swe.types import Checkout, Mount

_ASK = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2]); print(sys.base_prefix)"


class Interpreter(NamedTuple):
    """A Python and the folder that holds all of it; neither is a virtual environment."""

    program: Path
    prefix: Path


@functools.cache
def find_python(version: str) -> Interpreter:
    """The newest Python ``version`` ("3.9"). Raises ``ConfigError`` that says how to get one."""
    if not re.fullmatch(r"\d+(\.\d+){0,2}", version):
        raise ConfigError(f"{version!r:.50} is no version of Python")
    short = ".".join(version.split(".")[:2])
    for program in _candidates(short):
        if (prefix := _prefix(program, short)) is not None:
            inside = prefix / "bin" / f"python{short}"
            return Interpreter(inside if inside.exists() else Path(os.path.realpath(program)), prefix)
    raise ConfigError(f"Python {short} is not installed; get it with: uv python install {short} (or pyenv install)")


@functools.cache
def find_uv() -> Path:
    """The program ``uv``. Raises ``ConfigError``."""
    beside = Path(sys.executable).parent / "uv"
    try:
        from uv import find_uv_bin  # pyright: ignore[reportMissingImports]

        return Path(find_uv_bin())
    except (ImportError, FileNotFoundError):
        pass
    found = os.environ.get("UV") or shutil.which("uv") or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError("uv is not installed, which environments are made with; get it with: pip install uv")
    return Path(found).resolve()


def with_own_interpreter(directory: Path) -> Checkout:
    """A checkout whose commands have the Python that runs this program."""
    prefix = Path(sys.base_prefix).resolve()
    parts = [] if is_system(prefix.parts[1]) else installed_parts(prefix)
    return Checkout(
        directory=directory,
        mounts=tuple(Mount(host=part, inside=str(part)) for part in parts),
        variables={"PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )


def _candidates(version: str) -> Iterator[Path]:
    roots = [os.environ.get("PYENV_ROOT"), "~/.pyenv"]
    folders = [(Path(root).expanduser() / "versions", f"{version}.*") for root in roots if root]
    uv_root = os.environ.get("UV_PYTHON_INSTALL_DIR") or "~/.local/share/uv/python"
    folders.append((Path(uv_root).expanduser(), f"cpython-{version}.*"))
    for folder, pattern in folders:
        for found in sorted(folder.glob(pattern), key=_patch_level, reverse=True):
            yield found / "bin" / f"python{version}"
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        yield Path(sys.base_prefix) / "bin" / f"python{version}"
    if found := shutil.which(f"python{version}"):
        yield Path(found)


def _patch_level(folder: Path) -> int:
    digits = folder.name.removeprefix("cpython-").split("-")[0].split(".")[-1]
    return int(digits) if digits.isdigit() else -1


def _prefix(program: Path, version: str) -> Path | None:
    """The installation behind ``program``, when it works, is that version, and can make environments."""
    if not program.exists():
        return None
    try:
        asked = subprocess.run([program, "-I", "-c", _ASK], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found, prefix = asked.stdout.splitlines()[:2]
    return Path(prefix) if found == version else None
