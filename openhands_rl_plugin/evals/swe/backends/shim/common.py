"""What ``conda.py`` and ``pip.py`` share. ``SHIM_*`` are set by the back end, in the sandbox's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENTS = Path("/conda/envs")
OFFLINE = bool(os.environ.get("UV_OFFLINE"))
SEEDS = ("pip", "setuptools", "wheel")
"""What conda puts into every environment with Python."""


def prefix() -> Path:
    """The active environment."""
    return Path(os.environ.get("CONDA_PREFIX") or ENVIRONMENTS / os.environ.get("CONDA_DEFAULT_ENV", "testbed"))


def python(environment: Path | None = None) -> str:
    """The interpreter of an environment."""
    return str((environment or prefix()) / "bin" / "python")


def uv(*words: str, environment: Path | None = None, quiet: bool = False) -> int:
    """``uv pip WORDS`` for an environment; returns the exit status."""
    command = [os.environ["SHIM_UV"], "pip", words[0], "--python", python(environment), *words[1:]]
    return subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None, check=False).returncode


def uv_install(*words: str, environment: Path | None = None) -> int:
    """``uv pip install WORDS`` of what the index had at the pinned date."""
    pinned = [word for word in ("--exclude-newer", os.environ.get("SHIM_EXCLUDE_NEWER", "")) if word]
    return uv("install", *(pinned if len(pinned) == 2 else ()), *words, environment=environment)


def say(text: str) -> None:
    """One line on stderr, marked as not conda's own."""
    print(f"shim: {text}", file=sys.stderr, flush=True)
