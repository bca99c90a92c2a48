"""``openhands-rl demo``: the whole loop on one machine."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.quiet import quieten
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.demo.options import DemoOptions

HELP = "watch a small model learn to shop inside OpenHands: roll out, train, reload, evaluate"
EPILOG = """examples:
  openhands-rl demo                      the whole demo, about half an hour on two cores: eight iterations
                                         of 8 tasks by 6 episodes
  openhands-rl demo --tiny               the same path in two to four minutes
  openhands-rl demo --seed 1 --run-dir runs/seed-1
  openhands-rl demo --loop async         rollouts and training side by side
  openhands-rl demo --fresh              start over instead of resuming

Interrupt it when you like: the same command goes on where it stopped.
"""
RESUME = "the same command goes on where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run lies and how large it is."""
    parser.add_argument("--run-dir", type=Path, help="default: runs/demo, or runs/demo-tiny with --tiny")
    parser.add_argument("--seed", type=int, default=0, help="of training tasks, sampling and weights (default: 0)")
    parser.add_argument(
        "--tiny", action="store_true", help="a few goals and one iteration: shows the path, learns little"
    )
    parser.add_argument("--fresh", action="store_true", help="delete what the run directory holds of an earlier run")
    parser.add_argument("--iterations", type=int, help="of roll out, train and reload")
    parser.add_argument("--held-out", type=int, metavar="GOALS", help="goals of each evaluation")
    parser.add_argument(
        "--loop", choices=["sync", "async"], default="sync", help="async: rollouts go on while the policy is trained"
    )
    parser.add_argument(
        "--max-staleness", type=int, default=1, metavar="VERSIONS", help="of an async loop's rollouts (default: 1)"
    )
    parser.add_argument(
        "--partial-rollouts",
        choices=["finish", "continue"],
        default="finish",
        help="of an async loop: on the version that they began with, or on the newest (default: finish)",
    )
    parser.add_argument("--model", type=Path, help="directory of another Hugging Face chat model to start from")


def run(args: argparse.Namespace) -> int:
    """Run or resume the demo, then print the table and where the report lies."""
    quieten()
    prepare_threads()
    from openhands_rl_plugin.apps.demo.options import DemoOptions
    from openhands_rl_plugin.apps.loop.claim import check_alone, held

    check_alone()
    directory = (args.run_dir or Path("runs") / ("demo-tiny" if args.tiny else "demo")).absolute()
    loop = {"kind": args.loop, "max_staleness": args.max_staleness, "partial_rollouts": args.partial_rollouts}
    options = DemoOptions.model_validate(
        {"run_directory": directory, "model_directory": args.model, "seed": args.seed, "loop": loop}
    )
    options = options.shortened() if args.tiny else options
    given = {"iterations": args.iterations, "held_out": args.held_out}
    options = DemoOptions.model_validate(
        options.model_dump() | {name: value for name, value in given.items() if value is not None}
    )
    with held(directory):
        if args.fresh:
            _forget(directory)
        return _play(options)


def _play(options: DemoOptions) -> int:
    from openhands_rl_plugin.apps.demo.progress import ProgressListener, final_table
    from openhands_rl_plugin.apps.demo.story import run_demo

    started = time.monotonic()
    with ProgressListener(options.stages) as listener:
        result = run_demo(options, listener)
    listener.console.print(final_table(result.state))
    for line in result.comparisons:
        listener.console.print(line, highlight=False, soft_wrap=True)
    minutes = (time.monotonic() - started) / 60
    listener.console.print(f"{minutes:.1f} minutes; report: {result.report}", highlight=False, soft_wrap=True)
    return 0


def _forget(directory: Path) -> None:
    # Only what a run wrote is deleted: the directory may be somebody's.
    for name in ("trajectories", "adapters", "trainer", "training", "logs"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("state.json", "options.json", "report.html"):
        (directory / name).unlink(missing_ok=True)
