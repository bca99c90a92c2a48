"""uv's cache, shared by all environments, except for what it keeps by the path of a folder: every repository is at
``/testbed`` and every environment at one place, so that these parts belong to one layer each.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from openhands_rl_plugin.swe.caching import Cache
from openhands_rl_plugin.swe.interpreters import find_uv

INSIDE = Path("/var/cache/uv")

_PRIVATE = ("sdists-v*/editable", "sdists-v*/path", "interpreter-v*")
_PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "probe"
version = "1"
"""


def shared_folder(cache: Cache) -> Path:
    """The folder that all share."""
    return cache.path("uv", "any").parent


def private_parts(cache: Cache) -> tuple[str, ...]:
    """Names of the parts that are not shared, below the cache; they are there afterwards."""
    folder, uv = shared_folder(cache), find_uv()
    known = hashlib.sha256(f"{uv} {uv.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    seen = cache.path("uv-probes", known)
    if not seen.exists():
        _probe(folder, uv)
        seen.touch(mode=0o600)
    return tuple(sorted(str(found.relative_to(folder)) for part in _PRIVATE for found in folder.glob(part)))


def _probe(folder: Path, uv: Path) -> None:
    """Have this version of uv make its folders, by a project whose build fails at once, without a network."""
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as project:
        (Path(project) / "pyproject.toml").write_text(_PROJECT)
        (Path(project) / "backend.py").write_text("raise SystemExit(1)\n")
        options = ["--offline", "--no-deps", "--python", sys.executable, "--target", f"{project}/target"]
        command = [str(uv), "pip", "install", "--cache-dir", str(folder), *options]
        for target in (["--editable", "."], ["."]):
            subprocess.run([*command, *target], cwd=project, capture_output=True, check=False, timeout=120)
