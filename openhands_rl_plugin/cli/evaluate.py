"""``openhands-rl evaluate``: roll out an agent over a suite of tasks, grade the episodes, report and compare runs.

suites:
  swe-local             repository tasks that run on a laptop without Docker
  repair-1, -2, -3      one function with a bug, for small models, with its line, its name, or only the failing test
  swe-bench-lite, swe-bench-verified, swe-gym, swe-gym-lite
                        from the hub (needs the datasets package), or their rows with --dataset-file
  FILE                  rows in SWE-bench's columns: .jsonl, .json or .parquet
  webshop               the embedded shop, started for the run
  environment           the environment and server that [rl] of --config names: "agentgym/textcraft", "openenv/...",
                        "gymnasium/..."; from task 0 on (--tasks), or rows (.jsonl) with --dataset-file

examples:
  openhands-rl evaluate swe-local --llm eval --config config.toml --set max_workers=4
  openhands-rl evaluate swe-bench-verified --model openai/qwen --base-url http://127.0.0.1:8100/v1 --runs 4
  openhands-rl evaluate rows.jsonl --llm eval --config config.toml --agent RLAgent --set rollout_strategy=BestOfN \\
      --set strategy.n=4 --include 'pytest-dev__*' --limit 20 --dry-run
  openhands-rl evaluate webshop --agent RLAgent --model policy-v000007 --base-model SmolLM2-135M-Instruct \\
      --base-url http://127.0.0.1:8100/v1 --limit 50
  openhands-rl evaluate --report evaluation_outputs/*/CodeActAgent --out report
  openhands-rl evaluate --compare before/output.jsonl after/output.jsonl --out comparison

A run is OUT/<dataset>-<split>/<agent>/<model>_maxiter_<n>_N_<note>-run_<i>/ with output.jsonl, metadata.json,
llm_completions/, predictions.jsonl and report.json. Run 0 samples at temperature 0 and the others at 0.5 unless
[rl.sampling] temperature or the model's own says otherwise; a search samples at its strategy's temperature. Of [rl], a
repository task takes the limits that are set; timeouts of the model are those of [llm]. A run with another strategy,
model, seed or limit is not continued: give each experiment its own --note.

--report and --compare read folders of runs, or output.jsonl files. Runs whose folders differ only in -run_<i> are one
group. Intervals are bootstraps over tasks; pass@k is an exact expectation over subsets. With one run on either side
the p-value is from McNemar's exact test, with several from a sign permutation test over the tasks' differences.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli import options
from openhands_rl_plugin.cli.terminal import ENDING, sayable
from openhands_rl_plugin.config.build import check_environment_server, make_strategy, success_rule
from openhands_rl_plugin.config.host import agent_named, host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, UsageError
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.evals.runs import run_files
from openhands_rl_plugin.evals.runs.evaluate import STORE, evaluate, options_of, process_count
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, evaluated_settings, llm_section, select
from openhands_rl_plugin.evals.runs.suites import ENVIRONMENT, EvalTask, find_suite, tasks_of
from openhands_rl_plugin.evals.swe.instances import UNKNOWN, VerdictKind
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.models.engines.client import check_model_server
from openhands_rl_plugin.trajectories.view import console, progress_bar, table

RESUME = "finished episodes are kept, and the same command continues"
_SWE_GYM_TEMPERATURES = (0.0, 0.5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite, the agent, the model, the tasks, and how they are run."""
    parser.add_argument("suite", metavar="SUITE", nargs="?", help="the name of a suite, or a file of rows")
    parser.add_argument("--split", metavar="NAME", help="split of the data set (default: the suite's)")
    out = "folder of the results (default: evaluation_outputs), or of report.json and report.html"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    parser.add_argument("--note", default="v1", metavar="TEXT", help="name of this experiment, in its folder's name")
    parser.add_argument("--store", metavar="STORE", help=f"{options.STORE_HELP} (default: OUT/trajectories)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, roll out nothing")
    group = parser.add_argument_group("agent and model")
    group.add_argument("--agent", default="stock", metavar="NAME", help="RLAgent, an agent of OpenHands, or its own")
    options.add_settings(group)
    group.add_argument("--llm", default="", metavar="NAME", help="section [llm.NAME] of the config.toml, over [llm]")
    group.add_argument("--model", metavar="NAME", help="model name, as in [llm]")
    base = "base model of --model, if that is a version of an adapter (default: [rl.serving] model)"
    group.add_argument("--base-model", metavar="NAME", help=base)
    group.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server, up to and including /v1")
    options.add_tasks(parser.add_argument_group("tasks"))
    group = parser.add_argument_group("runs")
    group.add_argument("--runs", type=options.positive, default=1, metavar="RUNS", help="runs over all tasks")
    options.add_bounds(group)
    group.add_argument("--retry-failed", action="store_true", help="roll out again what failed of the infrastructure")
    options.add_repositories(group)
    group.add_argument("--network", action="store_true", help="let tests use the network")
    group.add_argument("--no-grade", action="store_true", help="do not grade: leave that to `openhands-rl grade`")
    group = parser.add_argument_group("finished runs, in place of SUITE")
    group.add_argument("--report", nargs="+", type=Path, metavar="RUN", help="show the figures of these runs")
    compared = "whether the second is better than the first, over the tasks of both"
    group.add_argument("--compare", nargs=2, type=Path, metavar=("RUN_A", "RUN_B"), help=compared)


def run(args: argparse.Namespace) -> int:
    """Evaluate. Raises ``RLError`` when an option, the data, the machine or the disk does not allow it."""
    if args.report or args.compare:
        return _read(args)
    if args.suite is None:
        raise UsageError("give SUITE, or finished runs with --report or --compare")
    plan = _plan(args, options.settings_of(args))
    options_of(plan, 0)  # refuses an agent that does not support the suite
    if args.dry_run:
        print(sayable("\n".join(_describe(plan, args))))
        return 0
    # Otherwise OpenHands logs every step.
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    ENDING.run(_evaluate(args, plan))
    return _report(plan, graded=not args.no_grade)


def _plan(args: argparse.Namespace, settings: RLSettings) -> EvaluationPlan:
    suite = find_suite(args.suite, args.split).of_environment(settings.env_name)
    sampling = settings.sampling.model_dump(include={"temperature", "top_p"}, exclude_unset=True)
    llm = llm_section(args.config, args.llm, model=args.model, base_url=args.base_url, **sampling)
    base_model, environment = args.base_model, suite.environment(settings)
    if base_model is None and PolicyRef.from_served_name("", llm.model).adapter is not None:
        base_model = settings.serving.model
        if not base_model:
            raise ConfigError(f"{llm.model} is a version of an adapter: give its base model with --base-model")
    chosen = {
        "agent": agent_named(args.agent, host_of(settings)),
        "suite": suite,
        "settings": evaluated_settings(settings, suite, llm, base_model or ""),
        "served": llm.model if base_model else "",
        "native_tool_calling": llm.native_tool_calling,
        "llm_retries": llm.num_retries,
        "out": (args.out or Path("evaluation_outputs")).absolute(),
        "temperatures": () if llm.temperature is not None else _SWE_GYM_TEMPERATURES,
        "graders": os.cpu_count() or 1,
        "success": success_rule(environment, settings.reward),
        "environment": {} if suite.software else {"env_name": environment, **settings.environment},
    }
    make_strategy(settings)  # an invalid one is refused before the first episode
    return options.checked(EvaluationPlan, options.given_fields(args, EvaluationPlan) | chosen)


def _entries(args: argparse.Namespace, plan: EvaluationPlan) -> tuple[EvalTask, ...]:
    entries = tasks_of(plan.suite, plan.settings.env_name, args.tasks, args.dataset_file)
    return select(entries, lambda entry: entry.task.id, args.include, args.exclude, args.limit)


async def _evaluate(args: argparse.Namespace, plan: EvaluationPlan) -> None:
    entries, store = _entries(args, plan), args.store or str(plan.out / STORE)
    async with open_store(store, create=True) as storage:
        with progress_bar("evaluating") as bar:

            def started(left: int) -> Callable[[run_files.Outcome], None]:
                serving = plan.settings.serving
                if left:  # refuses what all episodes would fail of
                    check_model_server(serving.base_url, plan.model, serving.api_key())
                    if plan.suite.name == ENVIRONMENT:
                        check_environment_server(plan.settings)
                bar.update(0, left)
                return finished

            def finished(outcome: run_files.Outcome) -> None:
                bar.print(f"{outcome.instance_id}  {outcome.kind.value}  ({outcome.seconds:.1f} s)")
                bar.advance()

            await evaluate(
                plan,
                entries,
                storage=storage,
                backend=options.backend_of(args, [entry.instance for entry in entries], network=args.network),
                grade=not args.no_grade,
                retry_failed=args.retry_failed,
                processes=process_count(plan.settings.max_workers) if args.processes is None else args.processes,
                started=started,
            )


def _describe(plan: EvaluationPlan, args: argparse.Namespace) -> list[str]:
    """The output of a dry run, which downloads no data set of the hub."""
    suite, settings, limits = plan.suite, plan.settings, plan.limits()
    on_hub = suite.on_hub and args.dataset_file is None
    count = f"instances of {suite.dataset}" if on_hub else f"{len(_entries(args, plan))} instances"
    strategy = f" with {settings.rollout_strategy}" if plan.agent == RL_AGENT else ""
    prompt = "as the server takes" if limits.max_prompt_length is None else f"{limits.max_prompt_length:,}"
    lines = [
        f"{suite.name}: {count}, {plan.runs} runs, {settings.max_workers} at a time",
        f"  agent: {plan.agent}{strategy}, at most {settings.max_turns} iterations and {plan.timeout:g} s",
        f"  model: {plan.model}{f' on {settings.serving.model}' if plan.served else ''} at {settings.serving.base_url}",
        f"  in tokens: prompt {prompt}, answer {limits.max_response_length:,}, observation {limits.max_obs_length:,}",
        *([] if suite.software else [f"  resolved by {plan.success}"]),
    ]
    for run in plan.each_run():
        run_files.check_same_settings(plan, run)
        folder, noted = plan.run_directory(run), run_files.json_object(run_files.metadata_of(plan, run, 0.0)["details"])
        done = len(run_files.finished_instances(folder))
        lines.append(f"  run {run.index}: temperature {noted['temperature']:g}, {done} done, {folder}")
    return lines


def _read(args: argparse.Namespace) -> int:
    """Report or compare finished runs. Raises ``RLError`` when a run or the store cannot be read."""
    together = [args.report] if args.report else [[each] for each in args.compare]
    sides = [run_files.read_runs(tuple(paths)) for paths in together]
    comparison, runs = run_files.compare(*sides) if args.compare else None, [run for side in sides for run in side]
    groups = run_files.figures_of(runs)
    _print_tables(groups, comparison)
    if args.out is not None:
        run_files.write_json_report(args.out, groups, comparison)
        # It imports the training loop.
        from openhands_rl_plugin.apps.loop.reporting import report_writer

        if (writer := report_writer()) is not None:
            writer.write_evaluation_report(args.out, runs, comparison)
    return 0


def _print_tables(
    groups: Sequence[run_files.EvaluationFigures], comparison: run_files.Comparison | None = None
) -> None:
    """Print a table with a column for each group of runs, and the comparison."""
    columns = [run_files.rows_of(each) for each in groups]
    lines = [(rows[0][0], *(value for _, value in rows)) for rows in zip(*columns, strict=True)]
    console().print(table(("", *(f"({at})" for at in range(1, len(groups) + 1))), lines))
    if comparison is not None:
        console().print(table(("comparison", ""), run_files.comparison_rows(comparison)))


def _report(plan: EvaluationPlan, *, graded: bool) -> int:
    """Print the results; exit code 1 when they say nothing about the agent. ``graded``: verdicts were wanted."""
    directories = tuple(plan.run_directory(run) for run in plan.each_run())
    runs = run_files.read_runs(directories)
    _print_tables(run_files.figures_of(runs))
    print("\n".join(str(directory) for directory in directories))
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    expected = set() if graded else {VerdictKind.UNGRADED}
    unknown = [outcome for outcome in outcomes if outcome.kind in UNKNOWN - expected]
    if unknown:
        why = sayable(unknown[0].reason or unknown[0].kind.value)
        print(f"{len(unknown)} of {len(outcomes)} attempts say nothing about the agent: {why}", file=sys.stderr)
    return int(len(unknown) == len(outcomes))
