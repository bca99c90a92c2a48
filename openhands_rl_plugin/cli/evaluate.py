"""``openhands-rl evaluate SUITE``: roll out an agent over a suite, grade the episodes, report and compare runs.

suites:
  swe-local             repository tasks that run on a laptop without Docker
  repair-1, -2, -3      one function with a bug, for small models; told are its line, its name, or only the failing test
  swe-bench-lite, swe-bench-verified, swe-gym, swe-gym-lite
                        from the hub (needs the datasets package), or their rows with --dataset-file
  FILE                  rows in SWE-bench's columns: .jsonl, .json or .parquet
  webshop               the embedded shop, started for the run
  environment           the environment and server that [rl] of --config names: "agentgym/textcraft", "openenv/...",
                        "gymnasium/..."; from task 0 on (--tasks), or rows (.jsonl) with --dataset-file

examples:
  openhands-rl evaluate swe-local --llm eval --config config.toml --workers 4
  openhands-rl evaluate swe-bench-verified --model openai/qwen --base-url http://127.0.0.1:8100/v1 --runs 4 --workers 16
  openhands-rl evaluate rows.jsonl --llm eval --config config.toml --agent RLAgent --strategy BestOfN \\
      --strategy-option n=4 --include 'pytest-dev__*' --limit 20 --dry-run
  openhands-rl evaluate webshop --agent RLAgent --model policy-v000007 --base-model SmolLM2-135M-Instruct \\
      --base-url http://127.0.0.1:8100/v1 --limit 50
  openhands-rl evaluate --report evaluation_outputs/*/CodeActAgent --out report
  openhands-rl evaluate --compare before/output.jsonl after/output.jsonl --out comparison

A run is OUT/<dataset>-<split>/<agent>/<model>_maxiter_<n>_N_<note>-run_<i>/ with output.jsonl, metadata.json,
llm_completions/, predictions.jsonl and report.json. Run 0 samples at temperature 0 and the others at 0.5 unless
--temperatures or the model's own temperature says otherwise; a search samples at its strategy's temperature. A run with
another strategy, model, seed or limit is not continued: give each experiment its own --note.

--report and --compare read folders of runs, or output.jsonl files of this harness or of OpenHands' own. Runs whose
folders differ only in -run_<i> are one group. Intervals are bootstraps over tasks; pass@k and best@k are exact
expectations over subsets. With one run on either side the p-value is from McNemar's exact test, with several from a
sign permutation test over the tasks' differences.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import (
    STORE_HELP,
    above_zero,
    add_bounds,
    add_repositories,
    add_tasks,
    checked,
    finite,
    given_fields,
    natural,
    not_negative,
    open_backend,
    open_store,
    positive,
)
from openhands_rl_plugin.cli.terminal import ENDING, sayable, typed
from openhands_rl_plugin.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from openhands_rl_plugin.config.rl import RLSettings
    from openhands_rl_plugin.core.types import JsonObject
    from openhands_rl_plugin.evals.report.figures import Comparison, EvaluationFigures
    from openhands_rl_plugin.evals.runs.evaluate import Evaluation
    from openhands_rl_plugin.evals.runs.outcome import EvalTask, Outcome
    from openhands_rl_plugin.evals.runs.plan import EvaluatedModel, EvaluationPlan
    from openhands_rl_plugin.evals.runs.run_files import RunRecord
    from openhands_rl_plugin.evals.runs.suites import Suite
    from openhands_rl_plugin.evals.swe.types import InstanceBackend

RESUME = "finished episodes are kept, and the same command continues"
_SWE_GYM_TEMPERATURES = (0.0, 0.5)
_ANSWER = "tokens of one completion (default: as in [llm]; of an environment, [rl] max_response_length)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite, the agent, the model, the tasks, and how they are run."""
    parser.add_argument("suite", metavar="SUITE", nargs="?", help="the name of a suite, or a file of rows")
    parser.add_argument("--split", metavar="NAME", help="split of the data set (default: the suite's)")
    out = "folder of the results (default: evaluation_outputs), or of report.json and report.html"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    note = "name of this experiment, part of its folder's name"
    parser.add_argument("--note", default="v1", metavar="TEXT", help=note)
    parser.add_argument("--store", metavar="STORE", help=f"{STORE_HELP} (default: OUT/trajectories)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, play nothing")
    _add_agent(parser.add_argument_group("agent"))
    _add_model(parser.add_argument_group("model"))
    add_tasks(parser.add_argument_group("tasks"))
    _add_runs(parser.add_argument_group("runs"))
    group = parser.add_argument_group("finished runs, in place of SUITE")
    group.add_argument("--report", nargs="+", type=Path, metavar="RUN", help="show the figures of these runs")
    compared = "whether the second is better than the first, over the tasks of both"
    group.add_argument("--compare", nargs=2, type=Path, metavar=("RUN_A", "RUN_B"), help=compared)
    version = "prefix of the version of a verifier's scores in --store, for best@k"
    group.add_argument("--verifier", default="verifier", metavar="VERSION", help=version)
    group.add_argument("--json", action="store_true", help="print report.json instead of tables")


def run(args: argparse.Namespace) -> int:
    """Evaluate. Raises ``RLError`` when an option, the data, the machine or the disk does not allow it."""
    from openhands_rl_plugin.evals.runs.evaluate import options_of, recorded_settings, settings_of

    if args.report or args.compare:
        return _read(args)
    if args.suite is None:
        raise UsageError("give SUITE, or finished runs with --report or --compare")
    plan = _plan(args)
    settings = settings_of(plan, args.config)
    options_of(plan, 0)  # refuses an agent that does not support the suite
    recorded = recorded_settings(plan, settings)
    _check_temperature(args, recorded)
    if args.dry_run:
        print(sayable("\n".join(_describe(plan, settings, recorded, args))))
        return 0
    # Otherwise OpenHands logs every step.
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    ENDING.run(_evaluate(args, plan, settings))
    return _report(plan, graded=not args.no_grade)


def _add_agent(group: argparse._ArgumentGroup) -> None:
    agent = "RLAgent, an agent of OpenHands, or stock: its own (default)"
    group.add_argument("--agent", default="stock", metavar="NAME", help=agent)
    group.add_argument("--strategy", default="", metavar="NAME", help="of RLAgent (default: [rl] rollout_strategy)")
    option = "option of the strategy; may be repeated"
    group.add_argument("--strategy-option", action="append", default=[], metavar="NAME=JSON", help=option)
    turns = "turns of an episode (default: 50; of an environment, [rl] max_turns)"
    group.add_argument("--max-iterations", "--max-turns", type=positive, metavar="TURNS", help=turns)
    prompt = "tokens of the longest prompt of an environment's episode (default: [rl] max_prompt_length)"
    group.add_argument("--max-prompt-length", type=positive, metavar="TOKENS", help=prompt)
    observed = "tokens of an observation (default: [rl] max_obs_length, or the model's max_message_chars)"
    group.add_argument("--max-obs-length", type=positive, metavar="TOKENS", help=observed)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", type=Path, metavar="FILE", help="a config.toml with [llm.NAME] and [rl]")
    group.add_argument("--llm", metavar="NAME", help="section [llm.NAME] of the config.toml (or llm.NAME)")
    group.add_argument("--model", metavar="NAME", help="model name, as in [llm]")
    base = "base model of --model, if that is a version of an adapter (default: [rl.serving] model)"
    group.add_argument("--base-model", metavar="NAME", help=base)
    group.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server, up to and including /v1")
    group.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the server's API key")
    group.add_argument("--temperature", type=not_negative, metavar="TEMPERATURE", help="temperature of all runs")
    group.add_argument("--temperatures", metavar="LIST", help="of run 0, run 1, ...; the last one is repeated")
    group.add_argument("--top-p", type=above_zero, metavar="PROBABILITY", help="probability mass of nucleus sampling")
    group.add_argument("--max-output-tokens", type=positive, metavar="TOKENS", help=_ANSWER)
    native = "tool calls by the server's API (default: as in [llm]); --no-...: calls in the text"
    group.add_argument("--native-tool-calling", action=argparse.BooleanOptionalAction, help=native)
    ids = "record token ids, for training (default: of RLAgent, where the server reports them)"
    group.add_argument("--token-ids", action=argparse.BooleanOptionalAction, help=ids)
    group.add_argument("--input-cost-per-token", type=not_negative, metavar="USD", help="price of a prompt token")
    group.add_argument("--output-cost-per-token", type=not_negative, metavar="USD", help="price of a sampled token")


def _add_runs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--runs", type=positive, default=1, metavar="RUNS", help="runs over all tasks")
    group.add_argument("--seed", type=int, default=0, metavar="SEED", help="sampling seed")
    group.add_argument("--shuffle", type=int, metavar="SEED", help="play the tasks in random order")
    at_a_time = "episodes at a time (default: 1; of an environment, [rl] max_workers)"
    group.add_argument("--workers", type=positive, metavar="EPISODES", help=at_a_time)
    success = "least return of a resolved task of an environment (default: [rl.reward] threshold, else its own)"
    group.add_argument("--success-at", type=finite, metavar="RETURN", help=success)
    add_bounds(group)
    retries = "retries of an episode after an infrastructure failure"
    group.add_argument("--retries", type=natural, default=2, metavar="RETRIES", help=retries)
    failed = "play episodes again that ended with an infrastructure failure"
    group.add_argument("--retry-failed", action="store_true", help=failed)
    add_repositories(group)
    group.add_argument("--network", action="store_true", help="let tests use the network")
    group.add_argument("--no-grade", action="store_true", help="do not grade: leave that to `openhands-rl grade`")
    group.add_argument("--no-completions", action="store_true", help="do not write llm_completions/")


def _plan(args: argparse.Namespace) -> EvaluationPlan:
    from openhands_rl_plugin.config.host import agent_named, host_of
    from openhands_rl_plugin.config.rl import RLSettings
    from openhands_rl_plugin.config.success import success_rule
    from openhands_rl_plugin.config.toml import load_settings
    from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, stated_bounds
    from openhands_rl_plugin.evals.runs.suites import find_suite

    settings = load_settings(args.config) if args.config is not None else RLSettings()
    suite = find_suite(args.suite, args.split).of_environment(settings.env_name)
    bounds, model = stated_bounds(settings, suite), _model(args)
    answer = bounds.pop("max_response_length", None)
    if answer is not None and "max_output_tokens" not in model.model_fields_set:
        model = model.model_copy(update={"max_output_tokens": answer})
    given = {name: value for name, value in given_fields(args, EvaluationPlan).items() if value is not None}
    environment = suite.environment(settings)
    host = host_of(settings)
    chosen = {
        "agent": agent_named(args.agent, host),
        "host": host,
        "suite": suite,
        "model": model,
        "base_model": _base_model(args, model),
        "out": (args.out or Path("evaluation_outputs")).absolute(),
        "strategy_options": dict(_option(each) for each in args.strategy_option),
        "temperatures": _temperatures(args, model),
        "graders": args.graders or os.cpu_count() or 1,
        "completions": not args.no_completions,
        "command": typed(args),
        "success": success_rule(environment, settings.reward, args.success_at),
        "environment": {} if suite.software else {"env_name": environment, **settings.environment},
    }
    return checked(EvaluationPlan, bounds | given | chosen)


def _model(args: argparse.Namespace) -> EvaluatedModel:
    from openhands_rl_plugin.evals.runs.plan import EvaluatedModel, evaluated_model

    named = {name: getattr(args, name, None) for name in (*EvaluatedModel.model_fields, "model")}
    return evaluated_model({name: value for name, value in named.items() if value is not None}, args.config, args.llm)


def _base_model(args: argparse.Namespace, model: EvaluatedModel) -> str:
    """The base model of an evaluated version of an adapter; empty when no adapter is evaluated."""
    from openhands_rl_plugin.config.toml import load_settings
    from openhands_rl_plugin.core.types import PolicyRef

    if args.base_model:
        return args.base_model
    if PolicyRef.from_served_name("", model.name).adapter is None:
        return ""
    base, colon, _ = model.name.rpartition(":")  # SGLang names an adapter BASE:VERSION
    known = load_settings(args.config).serving.model if args.config else ""
    if not (found := base if colon else known):
        raise ConfigError(
            f"{model.name} is a version of an adapter: give its base model, as the server names it, with --base-model, "
            "or as model in [rl.serving] of --config"
        )
    return found


def _temperatures(args: argparse.Namespace, model: EvaluatedModel) -> tuple[float, ...]:
    if args.temperatures is None:
        return () if model.temperature is not None else _SWE_GYM_TEMPERATURES
    try:
        return tuple(float(each) for each in args.temperatures.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {args.temperatures}: give numbers with commas between them") from error


def _check_temperature(args: argparse.Namespace, recorded: JsonObject) -> None:
    """Refuse a temperature of the runs when a search samples at its own."""
    own = recorded.get("temperature")
    for option in ("temperature", "temperatures"):
        if own is not None and getattr(args, option) is not None:
            raise ConfigError(
                f"--{option}: {recorded['strategy']} samples at its own temperature ({str(own).removesuffix('.0')}): "
                "set it with --strategy-option temperature=..."
            )


def _option(text: str) -> tuple[str, JsonValue]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--strategy-option {text}: give NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _entries(args: argparse.Namespace, suite: Suite, settings: RLSettings) -> tuple[EvalTask, ...]:
    from openhands_rl_plugin.evals.runs.plan import Selection
    from openhands_rl_plugin.evals.runs.suites import environment_tasks, swe_tasks

    if suite.software:
        entries = swe_tasks(suite, args.dataset_file)
    else:
        entries = environment_tasks(suite, settings.env_name, args.tasks, args.dataset_file)
    chosen = Selection(include=tuple(args.include), exclude=tuple(args.exclude), shuffle=args.shuffle, limit=args.limit)
    return chosen.of(entries, lambda entry: entry.task.id)


async def _evaluate(args: argparse.Namespace, plan: EvaluationPlan, settings: RLSettings) -> None:
    from openhands_rl_plugin.evals.runs.evaluate import STORE, evaluate, process_count
    from openhands_rl_plugin.trajectories.view import progress_bar

    def started(evaluation: Evaluation) -> Callable[[Outcome], None]:
        if evaluation.left:
            _check_parts(args, evaluation, settings)
        bar = shown.enter_context(progress_bar("evaluating", evaluation.left))

        def finished(outcome: Outcome) -> None:
            bar.print(f"{outcome.instance_id}  {outcome.kind.value}  ({outcome.seconds:.1f} s)")
            bar.advance()

        return finished

    entries = _entries(args, plan.suite, settings)
    store = args.store or str(plan.out / STORE)
    async with open_store(store, create=True) as storage, _backend(args, entries) as backend:
        with ExitStack() as shown:
            await evaluate(
                plan,
                entries,
                settings=settings,
                storage=storage,
                backend=backend,
                grade=not args.no_grade,
                retry_failed=args.retry_failed,
                processes=process_count(plan.workers) if args.processes is None else args.processes,
                started=started,
            )


def _check_parts(args: argparse.Namespace, evaluation: Evaluation, settings: RLSettings) -> None:
    """Raise for what all episodes would fail of: the model server, the environment."""
    from openhands_rl_plugin.config.build import check_environment_server
    from openhands_rl_plugin.evals.runs.suites import ENVIRONMENT
    from openhands_rl_plugin.models.engines.server_models import check_model_server

    model = evaluation.plan.model
    check_model_server(model.base_url, model.name, os.environ.get(model.api_key_env))
    if evaluation.plan.suite.name == ENVIRONMENT:
        check_environment_server(settings)


@asynccontextmanager
async def _backend(args: argparse.Namespace, entries: Sequence[EvalTask]) -> AsyncIterator[InstanceBackend | None]:
    instances = [entry.instance for entry in entries if entry.instance is not None]
    if not instances:
        yield None
        return
    async with open_backend(args, instances, network=args.network) as backend:
        yield backend


def _describe(plan: EvaluationPlan, settings: RLSettings, recorded: JsonObject, args: argparse.Namespace) -> list[str]:
    """The output of a dry run, which downloads no data set of the hub."""
    from openhands_rl_plugin.evals.runs.run_files import check_same_settings, finished_instances

    suite = plan.suite
    known = None if suite.on_hub and args.dataset_file is None else _entries(args, suite, settings)
    agent = f"{plan.agent} with {recorded['strategy']}" if "strategy" in recorded else plan.agent
    count = (
        f"{len(known)} instances" if known is not None else f"instances of {suite.dataset} ({suite.split}), on the hub"
    )
    adapts = f" on {plan.base_model}" if plan.base_model else ""
    lines = [
        f"{suite.name}: {count}, {plan.runs} runs, {plan.workers} at a time",
        f"  agent: {agent}, at most {plan.max_iterations} iterations and {plan.timeout:g} s",
        f"  model: {plan.model.name}{adapts} at {plan.model.base_url}",
        f"  in tokens: {_lengths(plan)}",
        *([] if suite.software else [f"  resolved by {plan.success}"]),
    ]
    for run in plan.each_run():
        check_same_settings(plan, run, recorded)
        directory = plan.run_directory(run)
        done = len(finished_instances(directory))
        temperature = recorded.get("temperature", run.temperature)
        sampled = "the model's" if temperature is None else str(temperature).removesuffix(".0")
        lines.append(f"  run {run.index}: temperature {sampled}, {done} done, {directory}")
    return lines


def _lengths(plan: EvaluationPlan) -> str:
    limits = plan.limits()
    prompt = "as the server takes" if limits.max_prompt_length is None else f"{limits.max_prompt_length:,}"
    return f"prompt {prompt}, answer {limits.max_response_length:,}, observation {limits.max_obs_length:,}"


def _read(args: argparse.Namespace) -> int:
    """Report or compare finished runs. Raises ``RLError`` when a run or the store cannot be read."""
    from openhands_rl_plugin.evals.report.figures import EvaluationReport, compare, figures_of, write_json_report
    from openhands_rl_plugin.evals.runs.run_files import read_runs, with_verifier
    from openhands_rl_plugin.trajectories.view import print_json

    async def judged(runs: tuple[RunRecord, ...]) -> tuple[RunRecord, ...]:
        async with open_store(args.store) as storage:
            return await with_verifier(runs, storage, args.verifier)

    sides = [read_runs(tuple(paths)) for paths in (args.report and [args.report]) or [[each] for each in args.compare]]
    sides = [ENDING.run(judged(runs)) if args.store else runs for runs in sides]
    comparison = compare(*sides) if args.compare else None
    runs = [run for side in sides for run in side]
    groups = figures_of(runs)
    if args.json:
        print_json(EvaluationReport(groups=groups, comparison=comparison))
    else:
        _print_tables(groups, comparison)
    if args.out is not None:
        from openhands_rl_plugin.apps.loop.reporting import report_writer

        write_json_report(args.out, groups, comparison)
        if (writer := report_writer()) is not None:
            writer.write_evaluation_report(args.out, runs, comparison)
    return 0


def _print_tables(groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Print a table with a column for each group of runs, and the comparison."""
    from openhands_rl_plugin.evals.report.figures import HEADINGS, comparison_rows, figure_row, kind_counts
    from openhands_rl_plugin.trajectories.view import console, table

    rows = [(*figure_row(group), kind_counts(group), group.in_force or "not recorded") for group in groups]
    lines = list(zip((*HEADINGS, "outcomes", "in force"), *rows, strict=True))
    console().print(table(("", *(f"({at})" for at in range(1, len(groups) + 1))), lines))
    if comparison is not None:
        console().print(table(("comparison", ""), comparison_rows(comparison)))


def _report(plan: EvaluationPlan, *, graded: bool) -> int:
    """Print the results; exit code 1 when they say nothing about the agent. ``graded``: verdicts were wanted."""
    from openhands_rl_plugin.evals.report.figures import figures_of
    from openhands_rl_plugin.evals.runs.run_files import read_runs
    from openhands_rl_plugin.evals.swe.run_evaluation import commonest
    from openhands_rl_plugin.evals.swe.types import UNKNOWN, VerdictKind

    directories = tuple(plan.run_directory(run) for run in plan.each_run())
    runs = read_runs(directories)
    _print_tables(figures_of(runs))
    print("\n".join(str(directory) for directory in directories))
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    expected = set() if graded else {VerdictKind.UNGRADED}
    unknown = [outcome for outcome in outcomes if outcome.kind in UNKNOWN - expected]
    if unknown:
        why = commonest((each.instance_id, each.reason or each.kind.value) for each in unknown)
        kinds = {each.kind for each in unknown}
        again = "; run them again with --retry-failed" if VerdictKind.INFRASTRUCTURE in kinds else ""
        print(
            f"{len(unknown)} of {len(outcomes)} attempts say nothing about the agent{sayable(why)}{again}",
            file=sys.stderr,
        )
    return int(len(unknown) == len(outcomes))
