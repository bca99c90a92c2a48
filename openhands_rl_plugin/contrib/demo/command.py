"""``openhands-rl demo``: train a small model to shop inside OpenHands: roll out, train, reload, evaluate.

examples:
  openhands-rl demo                      the whole demo, 16 to 35 minutes on two cores: eight iterations
                                         of 8 tasks by 6 episodes
  openhands-rl demo --tiny               the same path in two to four minutes, too small to learn
  openhands-rl demo --task repair        functions with a bug instead of the shop, in the workspace of OpenHands (V0
                                         where it is installed, else V1); one to two hours on two cores
  openhands-rl demo --seed 1 --run-dir runs/seed-1
  openhands-rl demo --loop async         rollouts and training side by side
  openhands-rl demo --fresh              start over instead of resuming

`openhands-rl studio runs/demo` shows episodes and curves while they come. You can interrupt the demo at any time: the
same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.apps.serving import given_weights
from openhands_rl_plugin.cli.options import checked, natural, positive
from openhands_rl_plugin.cli.terminal import silence_libraries
from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.contrib.demo.runs import DemoOptions, RepairOptions

_TASKS = "shop: buy what is asked for; repair: find and fix the bug of a function (default: shop)"
_TINY = "few tasks and one iteration: a quick check of all parts, too small to learn anything"
_TOO_SMALL = "--tiny checks that all parts work; it is too small to learn: expect the success to stay near zero"
SHOP, REPAIR = "shop", "repair"
RESUME = "the same command continues where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder of the run, and its size."""
    parser.add_argument("--task", choices=[SHOP, REPAIR], default=SHOP, help=_TASKS)
    folder = "folder of the run (default: runs/demo or runs/repair, -tiny with --tiny)"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="seed of tasks, sampling and weights")
    parser.add_argument("--tiny", action="store_true", help=_TINY)
    parser.add_argument("--fresh", action="store_true", help="delete the files of an earlier run in the folder")
    parser.add_argument("--iterations", type=positive, metavar="ITERATIONS", help="roll out, train, reload so often")
    parser.add_argument("--held-out", type=positive, metavar="TASKS", help="tasks in each evaluation")
    kinds = "async: rollouts continue while the policy is trained"
    parser.add_argument("--loop", choices=["sync", "async"], default="sync", help=kinds)
    staleness = "async: versions that a rollout may be behind"
    parser.add_argument("--max-staleness", type=natural, default=1, metavar="VERSIONS", help=staleness)
    parser.add_argument("--model", type=Path, metavar="DIR", help="another Hugging Face chat model to start from")


def run(args: argparse.Namespace) -> int:
    """Run or resume the demo, then print the results and the path of the report."""
    silence_libraries()
    prepare_threads()
    with from_extra("openhands,train,demo"):
        for module in ("openhands", "gguf", "torch"):
            import_module(module)
    from openhands_rl_plugin.apps.loop.checks import forget
    from openhands_rl_plugin.evals.runs.run_files import held

    if args.model is not None:  # before --fresh deletes anything
        given_weights(args.model)
    directory = (
        args.run_dir or Path("runs") / f"{'demo' if args.task == SHOP else REPAIR}{'-tiny' if args.tiny else ''}"
    ).absolute()
    options = _options(args, directory)
    with held(directory):
        if args.fresh:
            # Only the files of a run are deleted: the folder may hold others.
            forget(directory)
            for name in ("trajectories", "adapters"):
                shutil.rmtree(directory / name, ignore_errors=True)
        if args.tiny:
            print(_TOO_SMALL, flush=True)
        return _play(options, args.typed)


def _options(args: argparse.Namespace, directory: Path) -> DemoOptions | RepairOptions:
    from openhands_rl_plugin.contrib.demo.runs import DemoOptions, RepairOptions

    kind = DemoOptions if args.task == SHOP else RepairOptions
    options = kind(run_directory=directory, model_directory=args.model, seed=args.seed)
    options = options.shortened() if args.tiny else options
    given = {"iterations": args.iterations, "held_out": args.held_out}
    sizes = {name: value for name, value in given.items() if value is not None}
    loop = {"kind": args.loop, "max_staleness": args.max_staleness}
    return checked(kind, {**options.model_dump(), "loop": loop, **sizes})


def _play(options: DemoOptions | RepairOptions, command: str) -> int:
    from openhands_rl_plugin.apps.loop.reporting import ProgressListener
    from openhands_rl_plugin.contrib.demo.runs import DemoOptions, run_demo, run_repair_demo

    started = time.monotonic()
    with ProgressListener(options.stages) as listener:
        if isinstance(options, DemoOptions):
            result = run_demo(options, listener, command)
        else:
            result = run_repair_demo(options, listener, command)
    minutes = (time.monotonic() - started) / 60
    listener.ended(result.state, result.changes, f"{minutes:.1f} minutes; report: {result.report}")
    return 0
