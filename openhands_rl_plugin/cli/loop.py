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
evaluation, the iterations, and an evaluation after them. [rl.training] configures the training, [rl.reward] the reward.
If [rl.serving] names no server, the embedded one serves --model during the run. Episodes are stored in [rl.storage],
adapters in [rl.serving] adapters_path, and the state of the run in --run-dir.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

from openhands_rl_plugin.apps.serving import BASE, find_version, given_weights, served_policy, served_suite
from openhands_rl_plugin.cli import options
from openhands_rl_plugin.cli.options import add_option, checked, given_fields, settings_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable, silence_libraries
from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.threads import prepare_threads

EPISODES = ("timeout", "processes", "test_timeout", "native_tool_calling")
RESUME = "finished stages are kept, and the same command continues"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite, the settings, the model, the run and the tasks."""
    parser.add_argument("suite", metavar="SUITE", help="the name of a suite, or a file of rows")
    options.add_settings(parser, required=True)
    add_option(parser, "--model", "DIR", "the base model's weights (default: as the model server says)")
    add_option(parser, "--run-dir", "DIR", "folder of the run's state", default=Path("runs/loop"))
    start = "version of [rl.serving] adapter that a new run continues: a number, latest or base"
    add_option(parser, "--from", "VERSION", start, dest="start", default=BASE)
    parser.add_argument("--fresh", action="store_true", help="delete the state of an earlier run in the folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, roll out nothing")
    tasks = parser.add_argument_group("tasks")
    add_option(tasks, "--split", "NAME", "split to train on (default: train, if the suite has one)")
    options.add_tasks(tasks)
    add_option(tasks, "--held-out-file", "FILE", "rows of the held-out tasks, which are evaluated only")
    add_episodes(parser.add_argument_group("episodes"))


def run(args: argparse.Namespace) -> int:
    """Start or resume a run. Raises ``RLError`` when an option, a task, a server, the store or the disk is unusable."""
    silence_libraries()
    prepare_threads()
    with from_extra("openhands"):
        from openhands_rl_plugin.apps.loop.checks import check_trainable, claim, forget, identity_of
        from openhands_rl_plugin.apps.loop.reporting import ProgressListener
        from openhands_rl_plugin.apps.loop.run import loop_job, plan_lines, run_loop
        from openhands_rl_plugin.apps.loop.tasks import TaskSource, loop_tasks
    from openhands_rl_plugin.evals.runs.run_files import held
    from openhands_rl_plugin.training.algorithms import check_start

    settings, directory = settings_of(args), args.run_dir.absolute()
    check_trainable(settings)
    weights = None if settings.serving.base_url else given_weights(args.model)
    chosen = {"rows": args.dataset_file, "held_out_rows": args.held_out_file, "count": args.tasks}
    source = checked(TaskSource, given_fields(args, TaskSource) | chosen, {"count": "--tasks"})
    tasks, start = loop_tasks(source, settings), None
    if args.start != BASE:
        adapters = AdapterStore(settings.serving.adapters_directory.resolve())
        start = find_version(adapters, settings.serving.adapter, args.start, "--from")
        check_start(start, settings.training)
    if args.dry_run:
        print(sayable("\n".join(plan_lines(settings, tasks, start, directory, weights))))
        return 0
    started = time.monotonic()
    with held(directory), ExitStack() as opened:
        if args.fresh:
            forget(directory)
        begun_at, own = args.start if start else "", source.model_dump(mode="json")
        identity = identity_of(settings, own, model=args.model, timeout=args.timeout, start=begun_at)
        listener = opened.enter_context(ProgressListener(settings.loop.stages))
        settings = opened.enter_context(served_suite(settings, tasks.suite.name, directory))
        settings, model = opened.enter_context(served_policy(settings, args.model, directory))
        claim(directory, identity)  # where there is a server, so that a wrong address binds nothing
        given = {name: getattr(args, name) for name in EPISODES}
        backend = options.backend_of(args, [entry.instance for entry in tasks.entries])
        job = loop_job(settings, tasks, model, directory, backend=backend, start=start, command=args.typed, **given)
        result = ENDING.run(run_loop(job, listener))
    minutes, used = (time.monotonic() - started) / 60, result.state.adapter or "the base model"
    listener.ended(result.state, result.changes, f"{minutes:.1f} minutes; in use: {used}; report: {result.report}")
    return 0


def add_episodes(group: argparse._ActionsContainer) -> None:
    """How episodes of a suite are rolled out."""
    options.add_bounds(group)
    options.add_repositories(group)
    native = "tool calls by the server's API (default); --no-...: calls in the text"
    group.add_argument("--native-tool-calling", action=argparse.BooleanOptionalAction, default=True, help=native)
