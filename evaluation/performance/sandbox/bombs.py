"""Twelve sessions with bombs, and one that works at the same time: ``python -m evaluation.performance.sandbox.bombs``.

A fork bomb, a memory bomb and a bomb of small files in ``/tmp``, in four sessions each, with small limits (64
processes, 96 MiB): about 2 GiB in all. Needs control groups, or a user other than root. Prints how many of the steps of
the thirteenth session gave the right answer, and how long they took before and during the bombs.
``--as-user ID`` does it as that user, by an interpreter that may be executed by all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace import processes
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, SandboxLimits
from openhands_rl_plugin.environments.workspace.shell import Shell

_MEBIBYTE = 1024**2
_LIMITS = SandboxLimits(processes=64, memory=96 * _MEBIBYTE, temporary=16 * _MEBIBYTE)
_SECONDS = 6.0
BOMBS = {
    "fork": "bomb() { bomb | bomb & }; bomb; sleep 5",
    "memory": "for i in 1 2 3 4; do python3 -c 'import time; b = bytearray(60 << 20); time.sleep(2)' & done; wait",
    "files": "for i in $(seq 100000); do : > /tmp/$i || break; done",
}


def session(place: Path, name: str) -> Shell:
    """A session over an empty workspace."""
    (place / name).mkdir()
    return Shell(BubblewrapSandbox(place / name, temporary=_LIMITS.temporary), limits=_LIMITS)


def steps(shell: Shell, seconds: float) -> tuple[int, int, list[float]]:
    """Steps with the right answer, all steps, and their milliseconds."""
    right, taken = 0, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        wanted = f"{len(taken)}\n"
        right += shell.run(f"echo {len(taken)} > file; cat file", timeout=30).output == wanted
        taken.append((time.perf_counter() - began) * 1000)
    return right, len(taken), taken


def bomb(shell: Shell, command: str, stop: threading.Event) -> None:
    """The bomb again and again."""
    while not stop.is_set():
        try:
            shell.run(command, timeout=3)
        except InfrastructureError:
            return


def round_of(place: Path) -> str:
    """One figure."""
    quiet = session(place, "quiet")
    quiet.run(":", timeout=60)
    before = steps(quiet, _SECONDS)
    stop = threading.Event()
    shells = [(session(place, f"{name}{at}"), command) for at in range(4) for name, command in BOMBS.items()]
    threads = [threading.Thread(target=bomb, args=(shell, command, stop)) for shell, command in shells]
    for thread in threads:
        thread.start()
    during = steps(quiet, _SECONDS)
    stop.set()
    for shell, _ in shells:
        shell.close()
    for thread in threads:
        thread.join()
    quiet.close()
    times = [f"{statistics.median(each[2]):.0f} ms" for each in (before, during)]
    return (
        f"{during[0]} of {during[1]} steps right during the bombs ({before[0]} of {before[1]} before); "
        f"median of a step {times[1]} during, {times[0]} before, longest {max(during[2]):.0f} ms"
    )


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-user", type=int, help="the number of a user without rights")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="rl-bombs-"))
    if given.as_user:
        os.chown(place, given.as_user, given.as_user)
        os.setgroups([])
        os.setgid(given.as_user)
        os.setuid(given.as_user)
    try:
        if not processes._place() and not os.getuid():
            sys.exit("no control groups can be made here: use --as-user")
        print(f"user {os.getuid()}: {round_of(place)}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
