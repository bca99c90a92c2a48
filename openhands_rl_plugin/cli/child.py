"""``python -m openhands_rl_plugin.cli.child COMMAND ...``: a command that ends when its standard input ends.

``cli.jobs.running_command`` starts commands so; the stream also ends when the parent is killed.
"""

from __future__ import annotations

import os
import sys
import threading

from openhands_rl_plugin.cli import program


def _exit_with_parent() -> None:
    # Not sys.stdin: a thread that waits inside its lock makes the interpreter's own shutdown fail.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.exit(program())
