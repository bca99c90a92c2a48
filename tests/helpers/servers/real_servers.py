"""Published servers in Pythons of their own, and an episode on one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.core.types import Message, Observation, Task
from openhands_rl_plugin.environments.http.client import BaseEnvClient

START_S = 300.0


def named(variable: str) -> str:
    """What the variable says; without it the test is skipped."""
    if not (value := os.environ.get(variable)):
        pytest.skip(f"set {variable} to test against the real server")
    return value


@contextmanager
def serving(*command: str, path: str, cwd: Path, **environ: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The command with ``PORT`` in its arguments replaced, once it answers ``path``; its address and process."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = [each.replace("PORT", str(port)) for each in command]
    # A group of its own: some servers start further processes, which outlive them.
    with subprocess.Popen(arguments, cwd=cwd, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + START_S
            while not _answers(url + path):
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command} did not start within {START_S:g} s"
                time.sleep(0.1)
            yield url, process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def task(idx: int = 0, environment: str = "real", **data: Any) -> Task:
    return Task(id="t", environment=environment, data={"idx": idx, **data})


def reply(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


async def play(player: BaseEnvClient, of: Task, actions: list[str]) -> list[Observation]:
    seen = [await player.reset(of)]
    for action in actions:
        seen.append(await player.step(reply(action)))
    return seen
