"""uv's cache, shared by all environments, except for

- what uv keeps by the path of a folder: every repository is at ``/testbed`` and every environment at one place, so that
  each sandbox has these parts for itself;
- the index's pages and what is built from sources, of which there is one set for each date that packages are taken
  of: a page that was fetched after that date is good for ever, for this date, and builds use tools of that date.

uv renames files between the parts, which works within one mount only. In the shared cache these parts are therefore
links into ``OWN``, and ``OWN`` is, in each sandbox, a link to a folder inside the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.evals.swe.backends.caching import Cache
from openhands_rl_plugin.evals.swe.backends.interpreters import find_uv

INSIDE = Path("/var/cache/uv")
OWN = Path("/var/cache/uv-own")
"""The path of a sandbox's private parts."""

_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
_PRIVATE = ("sdists-v*/editable", "sdists-v*/path", "interpreter-v*")
_KINDS = ("git", "index", "pypi", "url")
_DATED = ("simple-v*", *(f"sdists-v*/{kind}" for kind in _KINDS))
_PYPI = "https://pypi.org/simple"
_FOR_EVER = "max-age=365000000, immutable"
# A date ends, somewhere, a day after it begins; another one for what uploads take to be seen.
_LATEST = timedelta(days=2)
_PAGE = b"<!DOCTYPE html><html><body></body></html>"
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
    """The shared folder."""
    return cache.path("uv", "any").parent


def make_own(cache: Cache, folder: Path, exclude_newer: str) -> None:
    """Make ``folder``, which a sandbox sees as ``OWN``, for packages of a date (empty: of today)."""
    # What a row says is no name of a folder.
    dated = Path("dated", hashlib.sha256(exclude_newer.encode()).hexdigest()[:16])
    shared = shared_folder(cache)
    for part in _found(shared, _PRIVATE):
        (folder / part).mkdir(parents=True)
    for part in _found(shared, _DATED):
        (shared / dated / part).mkdir(parents=True, exist_ok=True)
        (folder / part).symlink_to(INSIDE / dated / part)


def prepare(cache: Cache) -> None:
    """Make the shared folder what this module says of it, for the uv that is there now."""
    folder, uv = shared_folder(cache), find_uv()
    known = hashlib.sha256(f"{_PRIVATE} {_DATED} {uv} {uv.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    seen = cache.path("uv-probes", known)
    if seen.exists():
        return
    for part in _probe(uv):
        (folder / part).parent.mkdir(exist_ok=True)
        if not (folder / part).is_symlink():
            shutil.rmtree(folder / part, ignore_errors=True)
            # Another process may do the same at this moment.
            with suppress(FileExistsError):
                (folder / part).symlink_to(OWN / part)
    seen.touch(mode=0o600)


def index_settings(cache: Cache, exclude_newer: str, variables: Mapping[str, str]) -> Path | None:
    """A ``uv.toml`` by which a file of the index is fetched once, and a page of it once after ``exclude_newer``,
    whatever a proxy says. ``variables`` may name an index; ``None`` when its address holds a password.
    """
    index = next((variables[name] for name in _INDEX_VARIABLES if variables.get(name)), _PYPI)
    if "@" in index:
        return None
    controls = {"files": _FOR_EVER}
    with suppress(ValueError):
        age = datetime.now(UTC).date() - date.fromisoformat(exclude_newer) - _LATEST
        controls |= {"api": f"max-age={age.days * 86_400}"} if age.days > 0 else {}
    control = ", ".join(f"{name} = {json.dumps(value)}" for name, value in controls.items())
    text = f"[[index]]\nurl = {json.dumps(index)}\ndefault = true\ncache-control = {{ {control} }}\n"
    file = cache.path("uv-settings", f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml")
    if not file.exists():
        write_file(file, text)
    return file


def _found(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(str(found.relative_to(folder)) for pattern in patterns for found in folder.glob(pattern))


class _EmptyIndex(BaseHTTPRequestHandler):
    """An index without packages."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(_PAGE)))
        self.end_headers()
        self.wfile.write(_PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """No logging."""


def _probe(uv: Path) -> list[str]:
    """What this version of uv calls the parts, found by an index on this machine and a project whose build fails."""
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
        project, cache = Path(folder, "project"), Path(folder, "cache")
        project.mkdir()
        (project / "pyproject.toml").write_text(_PROJECT)
        (project / "backend.py").write_text("raise SystemExit(1)\n")
        server = ThreadingHTTPServer(("127.0.0.1", 0), _EmptyIndex)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/simple"
        command = [str(uv), "pip", "install", "--no-config", "--cache-dir", str(cache), "--index-url", index]
        command += ["--no-deps", "--python", sys.executable, "--target", f"{folder}/target"]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        variables |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        try:
            for target in (["--editable", "."], ["."], ["probe"]):
                subprocess.run(
                    [*command, *target], cwd=project, env=variables, capture_output=True, check=False, timeout=120
                )
        finally:
            server.shutdown()
            server.server_close()
        for bucket in cache.glob("sdists-v*"):
            for kind in _KINDS:
                (bucket / kind).mkdir(exist_ok=True)
        return _found(cache, (*_PRIVATE, *_DATED))
