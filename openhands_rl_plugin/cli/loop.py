"""``openhands-rl loop``: roll out, train and publish in turn, over an environment or a suite of tasks.

suites: those of `openhands-rl evaluate`
  webshop               the embedded shop, started for the run
  environment           the environment and server that [rl] of --config names; from task 0 on (--tasks), or rows
                        (.jsonl) with --dataset-file
  repair-1, -2, -3      one function with a bug, for small models; the others are
  swe-local, swe-gym, FILE, ...
                        repository tasks: the reward of an episode is the verdict of its tests

examples:
  openhands-rl loop webshop --config config.toml --model ./SmolLM2-135M-Instruct --set loop.demonstrations=64
  openhands-rl loop environment --config config.toml --tasks 500 --run-dir runs/babyai --dry-run
  openhands-rl loop environment --config config.toml --dataset-file train.jsonl --held-out-file test.jsonl \\
      --set loop.kind=async --set loop.iterations=20
  openhands-rl loop repair-1 --config config.toml --model ./SmolLM2-135M-Instruct --no-native-tool-calling \\
      --set loop.demonstrations=300
  openhands-rl loop swe-local --config config.toml --model ./Qwen3-4B --timeout 900
  openhands-rl loop swe-local --config config.toml --model ./Qwen3-4B --from latest    # after `openhands-rl train`

The stages: an evaluation on held-out tasks, then (with demonstrations) fine-tuning on scripted episodes and another
evaluation, the iterations, and a final evaluation. [rl.training] configures the training, [rl.reward] the reward. If
[rl.serving] names no server, the embedded one serves --model during the run. Episodes are stored in [rl.storage],
adapters in [rl.serving] adapters_path, and the state of the run in --run-dir.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.jobs import (
    BASE,
    add_episodes,
    find_version,
    given_weights,
    loop_job,
    running_command,
    served_policy,
)
from openhands_rl_plugin.cli.options import add_settings, add_tasks, checked, given_fields, settings_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable, silence_libraries
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.tasks import LoopTasks
    from openhands_rl_plugin.core.types import Adapter

RESUME = "finished stages are kept, and the same command continues"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite, the settings, the model, the run and the tasks."""
    parser.add_argument("suite", metavar="SUITE", help="the name of a suite, or a file of rows")
    add_settings(parser, required=True)
    weights = "folder of the base model's weights (default: as the model server says)"
    parser.add_argument("--model", type=Path, metavar="DIR", help=weights)
    folder = "folder of the run's state"
    parser.add_argument("--run-dir", type=Path, default=Path("runs/loop"), metavar="DIR", help=folder)
    start = "version of [rl.serving] adapter that a new run continues: a number, latest or base"
    parser.add_argument("--from", dest="start", default=BASE, metavar="VERSION", help=start)
    parser.add_argument("--fresh", action="store_true", help="delete the state of an earlier run in the folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, roll out nothing")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--split", metavar="NAME", help="split to train on (default: train, if the suite has one)")
    add_tasks(tasks)
    held_out = "rows of the held-out tasks, which are evaluated only"
    tasks.add_argument("--held-out-file", type=Path, metavar="FILE", help=held_out)
    add_episodes(parser.add_argument_group("episodes"))


def run(args: argparse.Namespace) -> int:
    """Start or resume a run. Raises ``RLError`` when an option, a task, a server, the store or the disk is unusable."""
    silence_libraries()
    prepare_threads()
    with from_extra("openhands"):
        from openhands_rl_plugin.apps.loop.checks import check_trainable, claim, forget, identity_of
        from openhands_rl_plugin.apps.loop.reporting import ProgressListener, final_table
        from openhands_rl_plugin.apps.loop.run import run_loop
        from openhands_rl_plugin.apps.loop.tasks import TaskSource, loop_tasks
    from openhands_rl_plugin.evals.runs.run_files import held
    from openhands_rl_plugin.evals.runs.suites import own_suite

    settings, directory = settings_of(args), args.run_dir.absolute()
    check_trainable(settings)
    if not settings.serving.base_url:
        given_weights(args.model)
    chosen = {"rows": args.dataset_file, "held_out_rows": args.held_out_file, "count": args.tasks}
    source = checked(TaskSource, given_fields(args, TaskSource) | chosen, {"count": "--tasks"})
    tasks, start = loop_tasks(source, settings), _start(args, settings)
    if args.dry_run:
        print(sayable("\n".join(_plan(args, settings, tasks, start))))
        return 0
    started = time.monotonic()
    with held(directory), ExitStack() as opened:
        if args.fresh:
            forget(directory)
        begun_at, own = args.start if start else "", source.model_dump(mode="json")
        claim(directory, identity_of(settings, own, model=args.model, timeout=args.timeout, start=begun_at))
        listener = opened.enter_context(ProgressListener(settings.loop.stages))
        suite = own_suite(name := tasks.suite.name)
        if suite is not None and suite.server:
            url = opened.enter_context(running_command(suite.server, directory / "logs" / f"{name}.log"))
            options = settings.environment if settings.env_name == name else {}
            there = {"env_name": name, "env_server_base": url, "environment": options}
            settings = settings.model_copy(update=there)
        settings, model = opened.enter_context(served_policy(settings, args.model, directory))
        job = replace(loop_job(args, settings, model, tasks, directory), start=start)
        result = ENDING.run(run_loop(job, listener))
    listener.console.print(final_table(result.state))
    minutes, used = (time.monotonic() - started) / 60, result.state.adapter or "the base model"
    last = f"{minutes:.1f} minutes; in use: {used}; report: {result.report}"
    print(sayable("\n".join([*(change.sentence() for change in result.changes), last])))
    return 0


def _start(args: argparse.Namespace, settings: RLSettings) -> Adapter | None:
    from openhands_rl_plugin.models.adapters.store import AdapterStore
    from openhands_rl_plugin.training.algorithms import check_start

    if args.start == BASE:
        return None
    adapters = AdapterStore(settings.serving.adapters_directory.resolve())
    start = find_version(adapters, settings.serving.adapter, args.start, "--from")
    check_start(start, settings.training)
    return start


def _plan(args: argparse.Namespace, settings: RLSettings, tasks: LoopTasks, start: Adapter | None) -> list[str]:
    """The output of a dry run."""
    from openhands_rl_plugin.apps.loop.run import STATE, objective_of
    from openhands_rl_plugin.training.loop.plan import LoopState

    loop, serving, done = settings.loop, settings.serving, len(LoopState.load(args.run_dir / STATE).records)
    model = f"{serving.model or 'the base model'} at {serving.base_url}"
    if not serving.base_url:
        model = f"{given_weights(args.model)}, by the embedded server"
    return [
        f"{tasks.suite.name}: {len(tasks.training)} tasks to train on, {len(tasks.held_out)} held out, "
        f"{len(tasks.demonstrations)} for demonstrations",
        f"  stages: {loop.stages}, {done} done; iterations: {loop.iterations} of {loop.tasks_per_iteration} tasks by "
        f"{loop.samples_per_task} episodes, {loop.kind}",
        f"  trained by {settings.training.algorithm} on the reward {objective_of(tasks, settings).name!r}",
        f"  model: {model}, starting from {start.name if start is not None else 'the base model'}",
        f"  adapters: {serving.adapter} in {serving.adapters_directory}; run: {args.run_dir.absolute()}",
    ]
