"""Keeping a server in the foreground."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def wait_until_stopped() -> None:
    """Return after Ctrl-C or ``kill``, so that the caller can end its server in good order."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    stopped.wait()
