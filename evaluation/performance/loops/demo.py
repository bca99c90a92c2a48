"""The demo over several seeds: wall time, peak memory, and held-out success after each kind of learning.

    python -m evaluation.performance.loops.demo --seeds 0 1 2 --runs runs/figures
    python -m evaluation.performance.loops.demo --task repair --seeds 0 --runs runs/repair

Each seed runs ``openhands-rl demo`` as a user would. Memory is the proportional set size of the whole process tree,
sampled every two seconds. A seed whose run directory holds finished figures is not run again. Of repair tasks it also
counts how the policy works: whether it runs the tests before it finishes, and whether it recovers from failed edits.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

from evaluation.performance.loops.repair_habits import habits
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.statistics import paired_difference
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.loop.plan import EVALUATIONS, LoopState, RunFacts, evaluations, success_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

GIGABYTE = 1_000_000  # in the kilobytes of /proc
FIGURES = "figures.json"


class Cost(Frozen):
    """What one run took."""

    minutes: float
    peak_gigabytes: float


def main() -> int:
    """Run what is missing and print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=("shop", "repair"), default="shop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"))
    args = parser.parse_args()
    rows = [measure(args.runs / f"seed-{seed}", seed, args.task) for seed in args.seeds]
    print("\n".join(line for row in rows for line in row))
    if args.task == "repair" and len(args.seeds) > 1:
        print(asyncio.run(_together(args.runs, args.seeds)))
    return 0


def measure(directory: Path, seed: int, task: str) -> list[str]:
    """The figures of one seed, run now if they are not there."""
    noted = directory / FIGURES
    if not noted.exists():
        cost = run(directory, seed, task)
        noted.write_text(cost.model_dump_json())
    cost = Cost.model_validate_json(noted.read_text())
    state = LoopState.load(directory / "state.json")
    lines = [f"seed {seed}: {cost.minutes:.1f} minutes, peak {cost.peak_gigabytes:.2f} GB"]
    for record in evaluations(state):
        if success := success_of(record):
            lines.append(
                f"  {record.name:<22} success {success.mean:.3f} [{success.low:.3f}, {success.high:.3f}] "
                f"reward {record.metrics['reward']:.3f} goals {success.n}"
            )
    facts = RunFacts.load(directory)
    lines += [f"  {change.sentence()}" for change in (facts.changes if facts else ())]
    return [*lines, *asyncio.run(_habits(directory, seed))] if task == "repair" else lines


async def _habits(directory: Path, seed: int) -> list[str]:
    lines: list[str] = []
    async with FileTrajectoryStorage(directory / "trajectories") as storage:
        for stage in EVALUATIONS:
            where = TrajectoryFilter(run_id=f"repair-{seed}/{stage}", failed=False)
            found = [(each, scores) async for each, scores in storage.find(where)]
            judged = [(each, any(score.reward == 1 for score in scores)) for each, scores in found]
            lines.append(f"  {stage:<22} {habits(judged).line()}")
    return lines


async def _together(runs: Path, seeds: list[int]) -> str:
    """RL against SFT over all seeds: each task's mean over them, with a bootstrap over tasks."""
    means: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        async with FileTrajectoryStorage(runs / f"seed-{seed}" / "trajectories") as storage:
            for stage in EVALUATIONS[-2:]:
                where = TrajectoryFilter(run_id=f"repair-{seed}/{stage}", failed=False)
                async for each, scores in storage.find(where):
                    solved = float(any(score.reward == 1 for score in scores))
                    means.setdefault(each.task.id, {}).setdefault(stage, []).append(solved)
    both = [
        stages for stages in means.values() if all(len(stages.get(one, ())) == len(seeds) for one in EVALUATIONS[-2:])
    ]
    before, after = ([fmean(stages[one]) for stages in both] for one in EVALUATIONS[-2:])
    found = paired_difference(before, after)
    return f"all seeds, RL - SFT: {found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}] over {found.n} tasks"


def run(directory: Path, seed: int, task: str) -> Cost:
    """Run the demo in a process of its own. Raises ``CalledProcessError`` when it fails."""
    command = [
        sys.executable,
        "-m",
        "openhands_rl_plugin.cli",
        "demo",
        "--task",
        task,
        "--seed",
        str(seed),
        "--run-dir",
        str(directory),
    ]
    started, peak = time.monotonic(), 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        peak = max(peak, sum(proportional_kilobytes(pid) for pid in process_tree(process.pid)))
        time.sleep(2)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(minutes=(time.monotonic() - started) / 60, peak_gigabytes=peak / GIGABYTE)


def process_tree(root: int) -> list[int]:
    """``root`` and its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def proportional_kilobytes(pid: int) -> int:
    """Memory of one process, shared pages divided among those that share them."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    sys.exit(main())
