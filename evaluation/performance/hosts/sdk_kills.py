"""Is every completion that OpenHands V1 acted on stored when its process is killed (``kill -9``) at a random moment?

    .venv-v1/bin/python -m evaluation.performance.hosts.sdk_kills [--kills 50] [--conversations 4] [--seed 0]

Each process plays so many conversations with ``RLAgent`` and its own tools. Every action is a command that writes its
own number into a file of the workspace: what the file has was acted on. After the kill each of these numbers must be in
a stored completion. The processes are forks that have imported everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import tempfile
import threading
import time
import traceback
from importlib.metadata import version
from pathlib import Path

from evaluation.performance.hosts.instant_model import instant_model, script
from evaluation.performance.hosts.sdk_workspace import OWN_ENGINE, OWN_TOOLS, converse
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

STEPS = 500
PATIENCE = 120.0
JOURNAL = "journal"


def play(kind: str, url: str, folder: Path, conversations: int) -> None:
    """Until the process is killed."""

    def one(number: int) -> None:
        conversation = converse(kind, url, folder / f"w{number}")
        acts = [{"bash": f"echo act-{number}-{step}- >> {JOURNAL}"} for step in range(STEPS)]
        conversation.send_message(script([*acts, {"finish": "done"}]))
        conversation.run()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(conversations)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def acted_in(folder: Path, conversations: int) -> list[str]:
    """The numbers of all actions that wrote theirs."""
    files = [folder / f"w{number}" / JOURNAL for number in range(conversations)]
    return [line for file in files if file.exists() for line in file.read_text().split()]


def killed(kind: str, url: str, folder: Path, conversations: int, chance: random.Random) -> None:
    """Play in a fork, and kill it at a random moment after all conversations have acted."""
    if (child := os.fork()) == 0:
        try:
            play(kind, url, folder, conversations)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    deadline = time.monotonic() + PATIENCE
    while not all((folder / f"w{number}" / JOURNAL).exists() for number in range(conversations)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 1.5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


async def stored_in(folder: Path) -> tuple[set[str], int]:
    """The numbers in all stored completions, and how many episodes can be read and are unfinished."""
    found: set[str] = set()
    unfinished = 0
    async with FileTrajectoryStorage(folder / "store") as storage:
        async for trajectory, _ in storage.find(TrajectoryFilter(finished=None)):
            unfinished += trajectory.stop is StopReason.UNFINISHED
            for node in trajectory.nodes:
                for call in node.message.tool_calls if node.sampled and node.tokens else ():
                    found.add(json.loads(call.arguments).get("command", "").partition("echo ")[2].partition(" ")[0])
    return found, unfinished


def main() -> None:
    """Kill, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    acted = lost = unfinished = 0
    with instant_model() as url, tempfile.TemporaryDirectory(prefix="rl-sdk-") as made:
        for number in range(options.kills):
            folder = Path(made) / str(number)
            kind = OWN_TOOLS if number % 2 else OWN_ENGINE
            killed(kind, url, folder, options.conversations, chance)
            done = acted_in(folder, options.conversations)
            stored, readable = asyncio.run(stored_in(folder))
            missing = [each for each in done if each not in stored]
            acted, lost, unfinished = acted + len(done), lost + len(missing), unfinished + readable
            if missing or readable < options.conversations:
                print(f"kill {number}: {len(done)} acted, not stored: {missing}; {readable} episodes")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, SDK {version('openhands-sdk')}"
    )
    print(
        f"{options.kills} kills: {acted} actions, {lost} of them not stored; {unfinished} episodes read as unfinished"
    )


if __name__ == "__main__":
    main()
