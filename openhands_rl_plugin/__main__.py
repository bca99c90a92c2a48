"""The program ``openhands-rl``, also as ``python -m openhands_rl_plugin``: ``cli.main``, with a quiet start.

Importing the command line takes a fifth of a second; Ctrl-C in it must not print the place in an import.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run one command and return the exit code, as ``cli.main`` does."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise someone decided that it is ignored
        signal.signal(signal.SIGINT, _end)
    from openhands_rl_plugin.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
