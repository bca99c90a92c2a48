"""Finds what a program has started, also when the program itself is gone: by a variable that its children inherit."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

_VARIABLE = "TESTS_MARK"


def mark() -> dict[str, str]:
    """The environment of a program whose processes are to be found."""
    return {**os.environ, _VARIABLE: uuid.uuid4().hex}


def marked(environment: dict[str, str]) -> list[int]:
    """The processes that were started with this environment and have not ended."""
    wanted = f"{_VARIABLE}={environment[_VARIABLE]}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:
            continue
    return found


def left_after(environment: dict[str, str], seconds: float) -> list[int]:
    """The processes that are still there after some time; returns as soon as there is none."""
    deadline = time.monotonic() + seconds
    while (found := marked(environment)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
