"""The program ``openhands-rl``, also as ``python -m openhands_rl_plugin``: ``cli.main``, with a quiet start.

Importing the command line takes a fifth of a second; a signal in it must not print the place in an import.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run one command and return the exit code, as ``cli.main`` does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise someone decided that it is ignored
        signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    from openhands_rl_plugin.cli import program

    return program()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n" if number == signal.SIGINT else b"terminated\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
