"""A real server for the tests of the MongoDB storage, as a process of its own that is reached over TCP.

``mongod`` where there is one; else ``mongoeco_server.py``, with this interpreter or, because that needs Python 3.13,
with another one that uv provides.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from pymongo import MongoClient
from pymongo.errors import ConnectionFailure
from uv_program import uv_program

HERE = Path(__file__).parent
SCRIPT = HERE / "mongoeco_server.py"

_READY_SECONDS = 120.0
_ANSWER_SECONDS = 240
_INSTALL_SECONDS = 300.0


class NoServerError(Exception):
    """None can be had; the text says why."""


class MongoServer:
    """A server on a free port of the loopback interface. ``lasting``: what it has is there after another start."""

    def __init__(self, folder: Path, *, lasting: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._folder, self._lasting = folder, lasting
        self._process: subprocess.Popen[bytes] | None = None

    def fail_once(self, command: str, **how: object) -> None:
        """Let the next such command fail: with ``errorCode``, or with ``writeConcernError`` after it was executed."""
        data = {"failCommands": [command], **how}
        with MongoClient(self.url) as client:
            client.admin.command({"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data})

    def fail_no_more(self) -> None:
        with MongoClient(self.url) as client:
            client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})

    @property
    def url(self) -> str:
        # Mongoeco takes seconds for a document of megabytes; on a busy machine that is more than the default allows.
        return f"mongodb://127.0.0.1:{self.port}/?socketTimeoutMS={_ANSWER_SECONDS * 1000}"

    def start(self) -> None:
        """Returns when the server answers."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*server_command(), *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self._wait()

    def stop(self) -> None:
        """Kills it, as a crash does."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process = None

    def _arguments(self) -> list[str]:
        if shutil.which("mongod"):
            where = ["--dbpath", str(self._folder), "--port", str(self.port), "--bind_ip", "127.0.0.1"]
            return [*where, "--nounixsocket", "--setParameter", "enableTestCommands=1"]
        return [str(self.port), *([str(self._folder / "data.sqlite")] if self._lasting else [])]

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _READY_SECONDS
        with MongoClient(self.url, serverSelectionTimeoutMS=200) as client:
            while self._process.poll() is None and time.monotonic() < until:
                with suppress(ConnectionFailure):
                    client.admin.command("hello")
                    return
        self.stop()
        raise NoServerError(f"the server did not start: {(self._folder / 'server.log').read_text()[-2000:]}")


@cache
def server_command() -> tuple[str, ...]:
    """How to start a server. Raises ``NoServerError``."""
    if mongod := shutil.which("mongod"):
        return (mongod,)
    if importlib.util.find_spec("mongoeco"):
        return (sys.executable, str(SCRIPT))
    return (_provided_python(), str(SCRIPT))


def _provided_python() -> str:
    """An interpreter with what ``mongoeco_server.py`` says that it needs."""
    uv = uv_program()
    if uv is None:
        raise NoServerError("there is no mongod on PATH; mongoeco needs Python 3.13, or uv to provide that")
    # As in .ci/setup: a company's proxy has certificates that only the machine knows.
    environ = {"UV_SYSTEM_CERTS": "1", **os.environ}
    reasons = []
    for python in (*_newer_pythons(), "3.13"):
        command = [uv, "run", "--no-project", "--quiet", "--python", python, "--script", str(SCRIPT), "--python"]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False, env=environ
            )
        except subprocess.TimeoutExpired:
            reasons.append(f"{python}: timed out")
            continue
        if ran.returncode == 0:
            return ran.stdout.strip()
        reasons.append(f"{python}: {ran.stderr.strip()[-300:]}")
    raise NoServerError(f"there is no mongod on PATH, and mongoeco cannot be had: {'; '.join(reasons)}")


def _newer_pythons() -> Iterator[str]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from (str(path) for path in sorted(root.glob("versions/3.13*/bin/python")))
