"""Cached virtual environments for tests, one for each Python and set of requirements."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.evals.swe.backends.interpreters import find_python, find_uv
from openhands_rl_plugin.evals.swe.backends.package_index import without_logins

_SECONDS = 900


def make_environment(python: str, requirements: Sequence[str], cache: Path) -> Path:
    """The folder of the environment; two runs may ask for the same one at a time.

    Raises ``ConfigError`` when there is no such Python, or no ``uv``; ``InfrastructureError`` without network.
    """
    key = hashlib.sha256("\n".join((python, *sorted(requirements))).encode()).hexdigest()[:16]
    final = cache / "task-environments" / f"{python}-{key}"
    if (final / "ready").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # Made in place, because a virtual environment cannot be moved.
    own = Path(tempfile.mkdtemp(dir=final.parent, prefix=f"{final.name}-"))
    _create(own, python)
    _install(own, requirements)
    (own / "ready").touch()
    try:
        final.symlink_to(own.name)
    except FileExistsError:
        shutil.rmtree(own)
    return final


def _create(folder: Path, python: str) -> None:
    program = str(find_python(python).program)
    words = [str(find_uv()), "venv", "--quiet", "--clear", "--python", program, str(folder)]
    _run(words, f"an environment of Python {python}")


def _install(folder: Path, requirements: Sequence[str]) -> None:
    words = [
        str(find_uv()),
        "pip",
        "install",
        "--quiet",
        "--compile-bytecode",
        "--python",
        str(folder / "bin" / "python"),
    ]
    if requirements:
        _run([*words, *requirements], f"the requirements {', '.join(requirements)}")


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"{what}: took more than {_SECONDS} s; try again") from error
    if done.returncode:
        said = without_logins(" ".join(done.stderr.split()).encode()).decode("utf-8", "replace")[-300:]
        raise InfrastructureError(f"{what}: could not be installed, is the package index within reach? {said}")
