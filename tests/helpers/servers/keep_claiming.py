"""A program that plays what lies in a queue until it is killed: it claims episodes, stores each, and finishes it.

An episode that it had stored before it died is finished without being stored again, as the store of trajectories has
it. One file for each that was stored; a second one would be an error, and ends the program with 7.

Usage: keep_claiming.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from openhands_rl_plugin.contrib.rollouts.owners import living_owner, release_dead
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.states import Result, RolloutState

TWICE = 7


def main(folder: Path) -> None:
    queue = JobQueue(folder)
    with living_owner(folder) as owner:
        print("ready", flush=True)
        while True:
            release_dead(queue, folder)
            session = queue.claim(owner)
            if session is None:
                time.sleep(0.005)
                continue
            queue.entered(session, owner, RolloutState.RUNNING)
            stored = folder / f"{session.session_id}.stored"
            if not stored.exists():
                time.sleep(0.002)
                try:
                    os.close(os.open(stored, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                except FileExistsError:
                    sys.exit(TWICE)
            queue.finish(
                session, owner, Result(state=RolloutState.COMPLETED, body=json.dumps({"by": owner}), usable=True)
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
