"""The demo over several seeds: wall time, peak memory, and held-out success after each kind of learning.

    python -m evaluation.performance.loops.demo --seeds 0 1 2 --runs runs/figures

Each seed runs ``openhands-rl demo`` as a user would. Memory is the proportional set size of the whole process tree,
sampled every two seconds. A seed whose run directory holds finished figures is not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from openhands_rl_plugin.apps.demo.summary import evaluations
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.loop.facts import RunFacts
from openhands_rl_plugin.training.loop.plan import LoopState

GIGABYTE = 1_000_000  # in the kilobytes of /proc
FIGURES = "figures.json"


class Cost(Frozen):
    """What one run took."""

    minutes: float
    peak_gigabytes: float


def main() -> int:
    """Run what is missing and print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"))
    args = parser.parse_args()
    rows = [measure(args.runs / f"seed-{seed}", seed) for seed in args.seeds]
    print("\n".join(line for row in rows for line in row))
    return 0


def measure(directory: Path, seed: int) -> list[str]:
    """The figures of one seed, run now if they are not there."""
    noted = directory / FIGURES
    if not noted.exists():
        cost = run(directory, seed)
        noted.write_text(cost.model_dump_json())
    cost = Cost.model_validate_json(noted.read_text())
    state = LoopState.load(directory / "state.json")
    lines = [f"seed {seed}: {cost.minutes:.1f} minutes, peak {cost.peak_gigabytes:.2f} GB"]
    for one in evaluations(state):
        lines.append(
            f"  {one.stage:<22} success {one.success.mean:.3f} [{one.success.low:.3f}, {one.success.high:.3f}] "
            f"reward {one.reward:.3f} goals {one.success.n}"
        )
    facts = RunFacts.load(directory)
    return [*lines, *(f"  {change.sentence('goals')}" for change in (facts.changes if facts else ()))]


def run(directory: Path, seed: int) -> Cost:
    """Run the demo in a process of its own. Raises ``CalledProcessError`` when it fails."""
    command = [
        sys.executable,
        "-m",
        "openhands_rl_plugin.cli",
        "demo",
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
