"""Time of a workspace fork, and isolation of forks: ``python -m evaluation.performance.search.fork``.

Prints milliseconds a fork of a session's workspace of 64 MB in 3,000 files (directory, ``/tmp``, shell and a sandbox
that is ready for commands), by every method that works here, as medians of interleaved repeats. Also prints how many
of 64 concurrent forks saw a file of another fork. Each fork is preceded by a ``sync``, so that no fork waits for the
writes of the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openhands.core.config import OpenHandsConfig
from openhands.events.action import CmdRunAction
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.storage.memory import InMemoryFileStore

from openhands_rl_plugin.core.errors import EpisodeError
from openhands_rl_plugin.environments.workspace.copies import ForkMethod
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime

BOUNDS_MS: dict[ForkMethod, float] = {"overlay": 150.0, "copy": 1000.0}
FILES = 3000
BYTES = 64 * 1024 * 1024
FILES_A_DIRECTORY = 50


def fill(folder: Path) -> None:
    """A workspace of random bytes."""
    source = random.Random(0)
    for number in range(FILES):
        file = folder / f"d{number // FILES_A_DIRECTORY}" / f"f{number}"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(source.randbytes(BYTES // FILES))


def session(folder: Path) -> WorkspaceRuntime:
    """A runtime over the workspace, as a session has it."""
    config = OpenHandsConfig(enable_browser=False, workspace_base=str(folder))
    runtime = WorkspaceRuntime(
        config=config,
        event_stream=EventStream("fork", InMemoryFileStore()),
        llm_registry=LLMRegistry(config),
        sid="fork",
        headless_mode=True,
    )
    asyncio.run(runtime.connect())
    return runtime


def milliseconds(runtime: WorkspaceRuntime, method: ForkMethod) -> float:
    """One fork. Raises ``EpisodeError`` where the method does not work."""
    os.sync()
    runtime.workspace.overlay = method == "overlay"
    started = time.perf_counter()
    twin = runtime.fork()
    elapsed = time.perf_counter() - started
    twin.close()
    return 1000 * elapsed


def possible(runtime: WorkspaceRuntime) -> list[ForkMethod]:
    """The methods that work here; the first use of each is not measured."""
    found: list[ForkMethod] = []
    for method in BOUNDS_MS:
        try:
            milliseconds(runtime, method)
        except EpisodeError:
            continue
        found.append(method)
    return found


def crossings(runtime: WorkspaceRuntime, forks: int) -> int:
    """How many of so many forks, 16 at a time, saw a file, a variable, a process or an output of another."""
    runtime.workspace.overlay = True

    def run(twin: WorkspaceRuntime, command: str) -> list[str]:
        action = CmdRunAction(command)
        action.set_hard_timeout(60)
        return str(getattr(twin.run_action(action), "content", "")).split()

    def right(number: int) -> bool:
        twin = runtime.fork()
        assert isinstance(twin, WorkspaceRuntime)
        try:
            run(twin, f"echo {number} | tee mine d0/f0 /tmp/mine; sleep 900 & export ME={number}")
            seen = run(twin, "cat mine d0/f0 /tmp/mine; echo $ME; ls | wc -l; pgrep -c sleep")
            return seen == [*[str(number)] * 4, str(FILES // FILES_A_DIRECTORY + 1), "1"]
        finally:
            twin.close()

    with ThreadPoolExecutor(16) as pool:
        return forks - sum(pool.map(right, range(forks)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forks", type=int, default=64, help="forks side by side")
    args = parser.parse_args()
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    with tempfile.TemporaryDirectory(prefix="fork-figures-") as folder:
        fill(Path(folder))
        runtime = session(Path(folder))
        methods = possible(runtime)
        taken: dict[ForkMethod, list[float]] = {method: [] for method in methods}
        for _ in range(args.repeats):
            for method in methods:
                taken[method].append(milliseconds(runtime, method))
        met = crossings(runtime, args.forks)
        runtime.close()
        runtime.event_stream.close()
    figures = {method: statistics.median(values) for method, values in taken.items()}
    for method in BOUNDS_MS:
        shown = f"{figures[method]:8.1f} ms (bound {BOUNDS_MS[method]:g})" if method in figures else "not possible here"
        print(f"fork by {method:<10}{shown}")
    print(f"of {args.forks} forks side by side, saw another's: {met} (bound 0)")
    print(json.dumps({**figures, "crossings": met}))


if __name__ == "__main__":
    main()
