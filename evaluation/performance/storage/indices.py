"""What the indices of the orders by reward and by tokens cost whoever writes: stores with and without, in turns.

    python -m evaluation.performance.storage.indices [--episodes 300] [--repeats 9]

"without" has the index by reward of releases before, which was one fewer. Processor time of the process, medians of
paired ratios; episodes of 8 turns that begin, grow turn by turn and end, and whole ones.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from evaluation.performance.studio.episodes import Words, coding_episode
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.trajectories.sqlite.database import FILE_NAME, make_database
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

_BEFORE = """
DROP INDEX episodes_by_reward;
DROP INDEX episodes_by_tokens;
CREATE INDEX episodes_reward ON episodes (reward) WHERE stop <> 'unfinished';
"""


async def play(storage: FileTrajectoryStorage, whole: Trajectory, number: str, *, at_once: bool) -> None:
    """Store an episode in one call, or as it is played: a call a turn."""
    one = whole.model_copy(update={"id": number})
    if at_once:
        await storage.add(one)
        return
    await storage.begin(EpisodeStart.of(one))
    cuts = [*(at for at, node in enumerate(one.nodes) if node.sampled), len(one.nodes)]
    for first, until in pairwise((0, *cuts[1:])):
        nodes = one.nodes[first:until]
        await storage.grow(EpisodeGrowth(trajectory_id=number, first=first, nodes=nodes, head=until - 1))
    await storage.end(EpisodeEnd.of(one))


async def measure(folder: Path, episodes: int, repeats: int, *, at_once: bool) -> list[float]:
    """With / without, of processor time, of every round."""
    words, names = Words(), ("with", "without")
    shapes = [coding_episode(words, "", seed=at, turns=8, reward=at / 8) for at in range(9)]
    for name in names:
        make_database(folder / name)
    taken: dict[str, list[float]] = {name: [] for name in names}
    stores = {name: FileTrajectoryStorage(folder / name, durable=False) for name in names}
    for storage in stores.values():
        await play(storage, shapes[0], "first", at_once=True)
    # After both were opened, because opening gives an older store its indices.
    with closing(sqlite3.connect(folder / "without" / FILE_NAME)) as connection:
        connection.executescript(_BEFORE)
    for at in range(repeats + 1):
        for name in names if at % 2 else names[::-1]:
            started = time.process_time()
            for each in range(episodes):
                shape = shapes[each % len(shapes)]
                await play(stores[name], shape, f"{at}-{each}", at_once=at_once)
            taken[name].append(time.process_time() - started)
    for storage in stores.values():
        await storage.close()
    return [own / other for own, other in zip(taken["with"][1:], taken["without"][1:], strict=True)]


def main() -> None:
    """Print both ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    for at_once in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            ratios = asyncio.run(measure(Path(folder), args.episodes, args.repeats, at_once=at_once))
        quarters = statistics.quantiles(ratios, n=4)
        told = f"{statistics.median(ratios):.3f} ({quarters[0]:.3f} to {quarters[2]:.3f})"
        print(f"{'whole' if at_once else 'turn by turn'}: with / without {told}, {args.repeats} rounds", flush=True)


if __name__ == "__main__":
    main()
