"""A command of ``openhands-rl`` as a child that cannot outlive its parent.

The parent holds the child's standard input open and writes nothing; the end of that stream, which also comes when the
parent is killed, ends the child.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from openhands_rl_plugin.core.errors import InfrastructureError


@contextlib.contextmanager
def running_command(arguments: Sequence[str], port: int, log: Path, *, timeout: float = 1800.0) -> Iterator[str]:
    """Run ``openhands-rl ARGUMENTS --port PORT`` until the block ends; yields its URL once ``/health`` answers.

    Raises ``InfrastructureError`` with the last line of the log when it ends before, or does not answer within
    ``timeout`` seconds: a large model, or a machine with other work, may take minutes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "openhands_rl_plugin.cli.child", *arguments, "--port", str(port)]
    with open(log, "ab") as output:
        # Fewer arenas: what one thread of the server frees, the others can use.
        environment = {"MALLOC_ARENA_MAX": "2", **os.environ}
        # A group of its own: Ctrl-C in the terminal is for the parent, whose last requests are still answered.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(child, url, log, time.monotonic() + timeout)
        yield url
    finally:
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _await_health(child: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise InfrastructureError(f"{url} did not come up: {_last_line(log)} (log: {log})")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.1)
    raise InfrastructureError(f"{url} does not answer yet, and is given up: {_last_line(log)} (log: {log})")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
