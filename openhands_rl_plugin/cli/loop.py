"""``openhands-rl loop SUITE``: roll out, train and publish in turn, over any environment or suite of tasks.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.jobs import (
    BASE,
    add_native,
    given_weights,
    graded_job,
    loop_job,
    served_policy,
    starting_point,
    with_backend,
)
from openhands_rl_plugin.cli.options import (
    add_bounds,
    add_repositories,
    add_settings,
    add_tasks,
    checked,
    given_fields,
    settings_of,
)
from openhands_rl_plugin.cli.terminal import ENDING, sayable, silence_libraries
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, from_extra
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.reporting import ProgressListener
    from openhands_rl_plugin.apps.loop.run import LoopJob, LoopResult
    from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource
    from openhands_rl_plugin.core.types import Adapter, JsonObject

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
    episodes = parser.add_argument_group("episodes")
    add_bounds(episodes)
    add_repositories(episodes)
    add_native(episodes)


def run(args: argparse.Namespace) -> int:
    """Start or resume a run. Raises ``RLError`` when an option, a task, a server, the store or the disk is unusable."""
    silence_libraries()
    prepare_threads()
    from openhands_rl_plugin.apps.loop.checks import held

    settings = settings_of(args)
    with from_extra("openhands"):
        from openhands_rl_plugin.apps.loop.checks import check_trainable
        from openhands_rl_plugin.apps.loop.tasks import loop_tasks
    check_trainable(settings)
    if not settings.serving.base_url:
        given_weights(args.model)
    tasks = loop_tasks(_source(args), settings)
    start = _start(args, settings)
    if args.dry_run:
        print(sayable("\n".join(_describe(args, settings, tasks, start))))
        return 0
    with held(args.run_dir.absolute()):
        return _play(args, settings, tasks, start)


def _source(args: argparse.Namespace) -> TaskSource:
    from openhands_rl_plugin.apps.loop.tasks import TaskSource

    chosen = {"rows": args.dataset_file, "held_out_rows": args.held_out_file, "count": args.tasks}
    return checked(TaskSource, given_fields(args, TaskSource) | chosen, {"count": "--tasks"})


def _play(args: argparse.Namespace, settings: RLSettings, tasks: LoopTasks, start: Adapter | None) -> int:
    from openhands_rl_plugin.apps.loop.checks import claim, forget
    from openhands_rl_plugin.apps.loop.reporting import ProgressListener

    directory = args.run_dir.absolute()
    if args.fresh:
        forget(directory)
    claim(directory, _identity(args, settings))
    started = time.monotonic()
    with ProgressListener(settings.loop.stages) as listener, _served(args, settings, tasks, directory) as found:
        job = replace(graded_job(args, loop_job(args, *found, tasks, directory)), start=start)
        result = ENDING.run(_run(args, job, listener))
    _report(result, listener)
    minutes = (time.monotonic() - started) / 60
    listener.console.print(
        f"{minutes:.1f} minutes; in use: {result.state.adapter or 'the base model'}; report: {result.report}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


async def _run(args: argparse.Namespace, job: LoopJob, listener: ProgressListener) -> LoopResult:
    from openhands_rl_plugin.apps.loop.run import run_loop

    async with with_backend(args, job) as whole:
        return await run_loop(whole, listener)


def _start(args: argparse.Namespace, settings: RLSettings) -> Adapter | None:
    from openhands_rl_plugin.models.adapters.store import AdapterStore
    from openhands_rl_plugin.training.algorithms import check_start

    serving = settings.serving
    adapters = AdapterStore(serving.adapters_directory.resolve())
    start = starting_point(adapters, serving.adapter, args.start)
    if start is not None:
        check_start(start, settings.training)
    elif args.start != BASE:
        raise ConfigError(
            f"--from {args.start}: there is no version of {serving.adapter} in {adapters.root} yet; train one with "
            "`openhands-rl train`, or omit --from"
        )
    return start


@contextmanager
def _served(
    args: argparse.Namespace, settings: RLSettings, tasks: LoopTasks, directory: Path
) -> Iterator[tuple[RLSettings, Path]]:
    """The settings with all addresses, and the weights of the base model. Servers that are not named are started."""
    from openhands_rl_plugin.cli.jobs import free_port, running_command
    from openhands_rl_plugin.evals.runs.suites import own_suite

    with ExitStack() as opened:
        own, name = own_suite(tasks.suite.name), tasks.suite.name
        if own is not None and own.server:
            log = directory / "logs" / f"{name}.log"
            url = opened.enter_context(running_command(own.server, free_port(), log))
            options = settings.environment if settings.env_name == name else {}
            there = {"env_name": name, "env_server_base": url, "environment": options}
            settings = settings.model_copy(update=there)
        yield opened.enter_context(served_policy(settings, args.model, directory))


def _identity(args: argparse.Namespace, settings: RLSettings) -> JsonObject:
    from openhands_rl_plugin.apps.loop.checks import identity_of

    start = args.start if args.start != BASE else ""
    tasks = _source(args).model_dump(mode="json")
    return identity_of(settings, tasks, model=args.model, timeout=args.timeout, start=start)


def _describe(args: argparse.Namespace, settings: RLSettings, tasks: LoopTasks, start: Adapter | None) -> list[str]:
    """The output of a dry run."""
    from openhands_rl_plugin.apps.loop.checks import evaluated_by
    from openhands_rl_plugin.apps.loop.run import STATE, objective_of
    from openhands_rl_plugin.training.loop.plan import LoopState

    loop, serving = settings.loop, settings.serving
    done = len(LoopState.load(args.run_dir / STATE).records)
    scripted = f", {len(tasks.demonstrations)} for demonstrations" if tasks.demonstrations else ""
    ahead = f", at most {loop.max_staleness} versions behind" if loop.kind == "async" else ""
    turns, other = loop.training_max_turns or settings.max_turns, evaluated_by(settings)
    apart = f"; held-out tasks: {(other or settings).rollout_strategy}, at most {settings.max_turns} turns"
    held_out = apart if other is not None or turns != settings.max_turns else ""
    policy = f"{serving.model or 'the base model'} at {serving.base_url}"
    return [
        f"{tasks.suite.name}: {len(tasks.training)} tasks to train on, {len(tasks.held_out)} held out{scripted}",
        f"  stages: {loop.stages}, {done} done; iterations: {loop.iterations} of {loop.tasks_per_iteration} tasks by "
        f"{loop.samples_per_task} episodes, {loop.kind}{ahead}",
        f"  trained by {settings.training.algorithm} on the reward {objective_of(tasks, settings).name!r}",
        f"  agent: {settings.rollout_strategy}, at most {turns} turns, {settings.max_workers} at a time{held_out}",
        f"  model: {policy if serving.base_url else f'{given_weights(args.model)}, by the embedded server'}",
        f"  adapters: {serving.adapter} in {serving.adapters_directory}; run: {args.run_dir.absolute()}",
        f"  starts from {start.name if start is not None else 'the base model'}",
    ]


def _report(result: LoopResult, listener: ProgressListener) -> None:
    from openhands_rl_plugin.apps.loop.reporting import final_table

    listener.console.print(final_table(result.state))
    for change in result.changes:
        listener.console.print(change.sentence(), highlight=False, soft_wrap=True)
