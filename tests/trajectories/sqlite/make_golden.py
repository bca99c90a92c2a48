"""Writes a store of the present schema version and, in ``expected.jsonl``, what must be read from it for ever.

Usage: make_golden.py FOLDER. Run it once for a new schema version; never again for an old one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from stored_samples import play, trajectory

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.testing.storage import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


async def main(folder: Path) -> None:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="gone", boundary="environment.step")
    async with FileTrajectoryStorage(folder) as storage:
        await storage.add(trajectory("whole", turns=2))
        await storage.add(trajectory("failed", stop=StopReason.ERROR, failure=failure, version=None))
        await play(storage, steps_of(sample_episode("played")))
        await play(storage, steps_of(sample_episode("unfinished"))[:3])
        await storage.add_scores([sample_score("whole", 0.5), sample_score("whole", None), sample_score("played", 1.0)])
        with open(folder / "expected.jsonl", "w", encoding="utf-8") as file:
            async for found, scores in storage.find(TrajectoryFilter(finished=None)):
                pair = [found.model_dump(mode="json"), [score.model_dump(mode="json") for score in scores]]
                file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
