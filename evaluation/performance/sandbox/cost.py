"""Milliseconds of a sandbox's start, of a step and of a fork, of this commit and of another, in turns.

git worktree add --detach /tmp/before e87ba33
python evaluation/performance/sandbox/cost.py /tmp/before --rounds 40
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parents[3]

# Executed by each commit's own code: one process a commit, one line for each round that is asked for.
_WORKER = r"""
import json, shutil, sys, tempfile, time
from pathlib import Path
from openhands_rl_plugin.environments.workspace.copies import Tree, fork_tree
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox
from openhands_rl_plugin.environments.workspace.shell import Shell

def since(began):
    return (time.perf_counter() - began) * 1000

for line in sys.stdin:
    place = Path(tempfile.mkdtemp(prefix="rl-cost-"))
    root = place / "work"
    root.mkdir()
    for number in range(300):
        (root / f"file{number}").write_text("text")
    sandbox = BubblewrapSandbox(root)
    began = time.perf_counter()
    shell = Shell(sandbox)
    shell.run(":", timeout=60)
    found = {"start": since(began)}
    began = time.perf_counter()
    for _ in range(20):
        shell.run("ls > /dev/null", timeout=60)
    found["step"] = since(began) / 20
    began = time.perf_counter()
    (place / "fork").mkdir()
    tree = fork_tree(Tree(root), place / "fork")
    twin = Shell(sandbox.over(tree.directory, tree.mounting()))
    twin.run(":", timeout=60)
    found["fork"] = since(began)
    began = time.perf_counter()
    twin.close()
    shell.close()
    found["close"] = since(began) / 2
    shutil.rmtree(place, ignore_errors=True)
    print(json.dumps(found), flush=True)
"""


def worker(tree: Path) -> subprocess.Popen[str]:
    """A process that measures with the code in ``tree``."""
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )


def measured(process: subprocess.Popen[str]) -> dict[str, float]:
    """One round."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    """Print the medians and quartiles of both, and the medians of the differences of rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a working tree of the other commit")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    workers = {"before": worker(given.before.resolve()), "now": worker(_HERE)}
    for process in workers.values():
        measured(process)  # what is tried once per process, such as which bwrap works
    rounds = [{name: measured(process) for name, process in workers.items()} for _ in range(given.rounds)]
    for process in workers.values():
        process.communicate()
    for what in ("start", "step", "fork", "close"):
        columns = {name: sorted(each[name][what] for each in rounds) for name in workers}
        parts = []
        for name, values in columns.items():
            low, middle, high = statistics.quantiles(values, n=4)
            parts.append(f"{name} {middle:7.2f} ms ({low:.2f} to {high:.2f})")
        difference = statistics.median(each["now"][what] - each["before"][what] for each in rounds)
        print(f"{what:6} {'  '.join(parts)}  difference {difference:+.2f} ms")


if __name__ == "__main__":
    main()
