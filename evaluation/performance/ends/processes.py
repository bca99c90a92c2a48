"""Two ways to start `openhands-rl`: as a new process, or as a fork of this process, which has imported everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

IMPORTED = (
    "openhands_rl_plugin.apps.loop.run",
    "openhands_rl_plugin.hosts.v0.controller_session",
    "openhands_rl_plugin.training.trainer.trainer",
    "openhands_rl_plugin.training.trainer.trainer",
    "peft",
)
"""Modules that a command imports at its start; they take more than ten seconds."""


class Process:
    """The command in a new process and its own session; its output goes to ``log``."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "openhands_rl_plugin", *words], stdout=out, stderr=out, start_new_session=True
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def wait(self, timeout: float = 900.0) -> int:
        """Wait for the end. Raises ``TimeoutExpired``."""
        return self._process.wait(timeout)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)


class Fork:
    """As ``Process``. There must be no other thread here."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._code: int | None = None
        if not (pid := os.fork()):
            _become(words, log)
        self.pid = pid

    def poll(self) -> int | None:
        """As in ``Process``."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float = 900.0) -> int:
        """As in ``Process``."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("openhands-rl", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """As in ``Process``."""
        os.kill(self.pid, number)


def _become(words: Sequence[str], log: Path) -> NoReturn:
    """Run the command in this process, then exit."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # until the command decides what they do
    from openhands_rl_plugin.cli import program

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, other in ((0, nothing), (1, out), (2, out)):
        os.dup2(other, number)
    sys.argv = ["openhands-rl", *words]
    code = 70
    try:
        code = program()
    finally:
        threading._shutdown()  # pyrefly: ignore[missing-attribute]  # as the interpreter does at its end
        os._exit(code)
